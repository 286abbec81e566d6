"""Checkpoints on disk: written in the background, verified when read.

Orbax writes a step's directory under a temporary name and renames it when it is
complete, so a kill at any moment leaves whole checkpoints only. What orbax does
not notice is a byte that changed afterwards: it restores a wrong value without
an error. Therefore each checkpoint carries digests of its arrays and of its
metadata, and restoring falls back from a damaged one to the one before it.

With several processes all of them call these functions at the same places. Each
writes and reads its own shards; the first one does everything else.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import os
import shutil
import time
from typing import Any

import jax

from launch.worker import agreement
from launch.worker import checkpoint_reader
from launch.worker import checkpoint_writer
from launch.worker import digests

# `dropped(step, reason)`: a damaged checkpoint is passed over, in one line.
Dropped = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to write checkpoints and which to keep.

  Attributes:
    every: steps between checkpoints.
    keep_last: number of the newest to keep, at least 2, so that a damaged one
      has a predecessor.
    keep_every: steps that this divides are kept for ever; 0 keeps none.
  """

  every: int
  keep_last: int
  keep_every: int

  def __post_init__(self):
    for name, value, least in (
      ('every', self.every, 1),
      ('keep_last', self.keep_last, 2),
      ('keep_every', self.keep_every, 0),
    ):
      if type(value) is not int or value < least:
        raise ValueError(
          f'checkpoint.{name}={value!r}: set it to a whole number of at least'
          f' {least}'
        )


class Checkpoints:
  """The checkpoints of one run, in a directory that nobody else writes.

  Not thread-safe. All processes of the run make one and call its methods.
  """

  def __init__(
    self, directory: str, config: CheckpointConfig, dropped: Dropped
  ):
    """Makes the directory and removes what a killed process left half-done.

    Args:
      directory: usually `<workdir>/checkpoints`.
      config: which checkpoints to keep.
      dropped: called for each damaged checkpoint that `restore` renames, in the
        first process.

    Raises:
      ValueError: the directory cannot be made or written.
      OSError: the disk is full.
    """
    self._directory = os.path.abspath(directory)
    self._config = config
    self._dropped = dropped
    self._writing: int | None = None  # the processes have yet to agree on it
    self._is_committed = False  # whether it is, as far as this process knows
    self._new: list[int] = []

    def prepare() -> None:
      os.makedirs(self._directory, exist_ok=True)
      _remove_leftovers(self._directory)

    with checkpoint_reader.one_line(self._directory):
      agreement.of_first(prepare)
    self._writer = checkpoint_writer.Writer()

  @property
  def failed(self) -> bool:
    """Whether this process knows that a write has failed.

    It differs between processes until the next `wait` or `save`, which raises
    on all of them; one process alone raises in `saved` instead.
    """
    return self._writer.failed

  def steps(self) -> list[int]:
    """Steps whose checkpoints are complete, oldest first."""
    return checkpoint_reader.steps(self._directory)

  def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
    """Starts to write a checkpoint; first waits for the one before it.

    The caller may donate the state's buffers to its next step right away. That
    step copies those that are not written yet.

    Args:
      step: names the checkpoint.
      state: pytree of jax or numpy arrays.
      metadata: JSON values to come back with the state.

    Raises:
      OSError: the one before it could not be written, or this one not begun.
      ValueError: there is a checkpoint of this step.
    """
    self.wait()
    path = self._path(step)

    def make_room() -> None:
      if os.path.exists(path):
        raise ValueError(f'{path} exists: save each step once')
      _remove_leftovers(self._directory)
      # Orbax would let the other processes wait long for a failure to do this.
      os.mkdir(f'{path}.deleting')
      os.rmdir(f'{path}.deleting')

    self._is_committed = False
    agreement.of_first(lambda: self._explained(step, make_room))
    named = checkpoint_reader.named(state)
    sealed = digests.seal(metadata, named)
    self._writing = step
    with self._undone_on_failure():
      agreement.everyone(
        lambda: self._explained(
          step, lambda: self._writer.begin(path, named, sealed)
        )
      )

  def saved(self) -> list[int]:
    """Steps committed since the last call; one look at the disk, no wait.

    Of several processes the first one knows; the others learn it in `wait`.

    Raises:
      OSError: writing failed; with errno ENOSPC where the disk is full. The
        step does not count and leaves nothing behind. Several processes raise
        it in `wait` or the next `save`, all of them.
    """
    if self._writing is not None and not self._is_committed:
      self._writer.look()
      is_there = agreement.is_first() and os.path.isdir(
        self._path(self._writing)
      )
      if jax.process_count() == 1 and (is_there or self.failed):
        self.wait()
      elif is_there:
        self._note()
    new, self._new = self._new, []
    return new

  def wait(self) -> None:
    """Returns when everything is committed; raises as `saved`."""
    if self._writing is not None:
      with self._undone_on_failure():
        agreement.everyone(lambda: self._explained(self._writing, self._finish))
      self._writing = None

  def close(self) -> None:
    """Waits, then ends the writer; raises as `saved`.

    Does not agree with the other processes, since one that has crashed closes
    alone: `wait` before, where all are well.
    """
    try:
      if self._writing is not None:
        with self._undone_on_failure():
          self._explained(self._writing, self._finish)
        self._writing = None
    finally:
      self._writer.close()
      # Writes that outlived the failure of another may have made files since.
      if agreement.is_first() and os.path.isdir(self._directory):
        _remove_leftovers(self._directory)

  def restore(self, target: Any) -> checkpoint_reader.Restored | None:
    """The newest good checkpoint, or None where there is none at all.

    Damaged newer ones are renamed to `<step>.corrupt`, so that the steps can be
    saved again. If none is good, all stay as they are.

    Args:
      target: pytree of arrays or `jax.ShapeDtypeStruct`; a leaf without a
        sharding goes to the first device of each process. The mesh may be
        another than that of the process that saved.

    Raises:
      ValueError: all are damaged, they belong to another model, or they may not
        be read.
    """
    with checkpoint_reader.one_line(self._directory):
      found, damaged = checkpoint_reader.newest_good(
        self._directory, checkpoint_reader.named(target), ''
      )
    agreement.of_first(lambda: self._put_aside(damaged))
    return found and found._replace(
      state=checkpoint_reader.like(target, found.state)
    )

  def _path(self, step: int) -> str:
    return os.path.join(self._directory, str(step))

  def _note(self) -> None:
    if not self._is_committed:
      self._is_committed = True
      self._new.append(self._writing)

  def _finish(self) -> None:
    """Waits for the commit; then the first process removes old checkpoints."""
    self._writer.finish()
    self._note()
    if agreement.is_first():
      path = self._path(self._writing)
      assert os.path.isdir(path), f'{path} is not there after its commit'
      self._remove_old()

  def _explained(self, step: int, act: Callable[[], None]) -> None:
    """Calls `act`, and raises OSError if the disk failed to write the step."""
    try:
      act()
    except Exception as error:
      number = agreement.error_number(error)
      if number is None or self._is_committed:
        raise
      raise OSError(
        number,
        f'the checkpoint of step {step} was not written: {os.strerror(number)}',
        self._directory,
      ) from error

  @contextlib.contextmanager
  def _undone_on_failure(self) -> Iterator[None]:
    """Removes what a failed write left, whichever process it failed in."""
    try:
      yield
    except Exception:
      step, self._writing = self._writing, None
      # Where it began well it goes on, until it meets the process that failed.
      with contextlib.suppress(Exception):
        self._writer.finish()
      if agreement.is_first():
        if os.path.exists(self._path(step)) and not self._is_committed:
          _remove(self._path(step))
        _remove_leftovers(self._directory)
      raise

  def _put_aside(self, damaged: list[tuple[int, str]]) -> None:
    for step, reason in damaged:
      aside = f'{self._path(step)}.corrupt'
      if os.path.exists(aside):
        _remove_tree(aside)
      os.rename(self._path(step), aside)
      self._dropped(step, reason)

  def _remove_old(self) -> None:
    """Called after a commit only, so that something newer exists."""
    every = self._config.keep_every
    for step in self.steps()[: -self._config.keep_last]:
      if not every or step % every:
        _remove(self._path(step))


def restore_params(directory: str, target: Any, dropped: Dropped) -> Any:
  """The params of another run's newest good checkpoint; writes nothing.

  Args:
    directory: that run's workdir, or its directory of checkpoints.
    target: params as pytree of arrays or `jax.ShapeDtypeStruct`; a leaf without
      a sharding goes to the first device.
    dropped: called for each damaged checkpoint that is passed over, in the
      first process.

  Returns:
    The params, bitwise as saved.

  Raises:
    ValueError: no such directory, no good checkpoint in it, or another model's.
  """
  directory = agreement.of_first(lambda: _directory_of_run(directory))
  with checkpoint_reader.one_line(directory):
    found, damaged = checkpoint_reader.newest_good(
      directory, checkpoint_reader.named({'params': target}), 'params/'
    )
  if found is None:
    raise ValueError(
      f'{directory} holds no checkpoint: name the workdir of a run that has one'
    )
  if agreement.is_first():
    for step, reason in damaged:
      dropped(step, reason)
  return checkpoint_reader.like({'params': target}, found.state)['params']


def _directory_of_run(directory: str) -> str:
  """The directory of checkpoints in a workdir, or itself."""
  directory = os.path.abspath(os.path.expanduser(directory))
  inner = os.path.join(directory, 'checkpoints')
  if os.path.isdir(inner):
    return inner
  if not os.path.isdir(directory):
    raise ValueError(
      f'{directory} is no directory: name the workdir of a run that has'
      ' checkpoints'
    )
  return directory


def _remove(path: str) -> None:
  # Renamed first: a kill in the middle leaves no half checkpoint by its name.
  doomed = f'{path}.deleting'
  os.rename(path, doomed)
  _remove_tree(doomed)


def _remove_leftovers(directory: str) -> None:
  for name in os.listdir(directory):
    if '.orbax-checkpoint-tmp' in name or name.endswith('.deleting'):
      _remove_tree(os.path.join(directory, name))


def _remove_tree(path: str) -> None:
  # When one array cannot be written, the others' files still come and go.
  for _ in range(100):
    try:
      return shutil.rmtree(path)
    except OSError as error:
      if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
        raise
    time.sleep(0.05)
  return shutil.rmtree(path)
