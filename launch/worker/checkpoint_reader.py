"""Reads checkpoints: the newest one that is whole, its arrays by path.

A checkpoint is a directory named by its step. It holds two orbax items:
`state`, the arrays in nested dicts, and `metadata`, JSON sealed by `digests`.

With several processes all of them read together: the first one chooses what to
try, each reads its own shards, and what one cannot read counts for all.
"""

from collections.abc import Iterator
import contextlib
import errno
import json
import os
import re
from typing import Any
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp

from launch.worker import agreement
from launch.worker import digests

# Not the checkpoint's fault: another attempt at the same files may succeed.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Restored(NamedTuple):
  """A verified checkpoint.

  Attributes:
    step: of the checkpoint.
    state: the arrays, bitwise as saved, in the target's tree and shardings.
    metadata: what the caller of `save` gave.
  """

  step: int
  state: Any
  metadata: dict[str, Any]


def newest_good(
  directory: str, target: dict[str, Any], prefix: str
) -> tuple[Restored | None, list[tuple[int, str]]]:
  """The newest good checkpoint and the damaged newer ones with reasons.

  Args:
    directory: of the checkpoints.
    target: arrays or their descriptions by path.
    prefix: of the paths to restore; the target has all of them.

  Returns:
    The checkpoint with its state as arrays by path.

  Raises:
    ValueError: all are damaged, another model's, or not there for a process.
    OSError: they may not be read.
  """
  damaged = []
  for step in _candidates(directory):
    path = os.path.join(directory, str(step))
    try:
      content, difference, state = _read(path, target, prefix)
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise  # too little memory for a checkpoint that may be good
    except Exception as error:  # orbax raises all kinds on damaged files
      if agreement.error_number(error) in _REFUSED:
        raise
      damaged.append((step, _reason(error)))
      continue
    if difference:
      raise ValueError(
        f'{path} holds another model or optimizer: {difference}. Use the'
        ' settings it was written with, or another directory'
      )
    return Restored(step, state, content), damaged
  if damaged:
    step, reason = damaged[0]
    raise ValueError(
      f'all checkpoints in {directory} are damaged (step {step}: {reason}).'
      ' Put back a copy, or move the directory away to begin anew'
    )
  return None, []


def _candidates(directory: str) -> list[int]:
  """Steps to try, the newest first, which all processes see."""
  found = agreement.of_first(lambda: steps(directory)[::-1])

  def look() -> None:
    seen = []
    with contextlib.suppress(FileNotFoundError):
      seen = steps(directory)
    if missing := set(found) - set(seen):
      raise ValueError(
        f'process {jax.process_index()} does not see'
        f' {os.path.join(directory, str(max(missing)))}: put it on a file'
        ' system that all hosts share'
      )

  agreement.everyone(look)
  return found


def _read(
  path: str, target: dict[str, Any], prefix: str
) -> tuple[dict[str, Any], str, dict[str, jax.Array]]:
  """Metadata, how the target differs, and verified arrays where it does not."""
  content, arrays = agreement.of_first(lambda: _read_metadata(path))
  if difference := _difference(arrays, target, prefix):
    return content, difference, {}
  state = agreement.everyone(lambda: _read_arrays(path, target))
  digests.verify(state, arrays)
  return content, '', state


def _read_metadata(path: str) -> tuple[dict[str, Any], digests.Arrays]:
  file = os.path.join(path, 'metadata', 'metadata')
  with open(file, encoding='utf-8') as stream:
    return digests.unseal(json.load(stream))


def _read_arrays(path: str, target: dict[str, Any]) -> dict[str, jax.Array]:
  """Restores the arrays of the target's paths, placed as it says."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  wanted = {
    name: jax.ShapeDtypeStruct(
      leaf.shape,
      leaf.dtype,
      sharding=getattr(leaf, 'sharding', None) or device,
    )
    for name, leaf in target.items()
  }
  wanted = nested(wanted)
  # Each process reads alone: orbax's barriers would wait for one that fails.
  alone = ocp.options.MultiprocessingOptions(
    active_processes={jax.process_index()}
  )
  # What was saved whole is read whole for any part of it: only a few at a time.
  largest = max(leaf.size * leaf.dtype.itemsize for leaf in target.values())
  handler = ocp.PyTreeCheckpointHandler(
    restore_concurrent_gb=1 + 2 * largest // 10**9
  )
  with ocp.Checkpointer(
    ocp.CompositeCheckpointHandler(state=handler), multiprocessing_options=alone
  ) as reader:
    restored = reader.restore(
      path,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeRestore(
          wanted,
          restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
          partial_restore=True,
        )
      ),
    )
  return named(restored.state)


def _difference(
  arrays: digests.Arrays, target: dict[str, Any], prefix: str
) -> str:
  """The first path where checkpoint and target differ; '' if none does."""
  there = {
    path: f'{array["dtype"]}{array["shape"]}'
    for path, array in arrays.items()
    if path.startswith(prefix)
  }
  here = {
    path: f'{leaf.dtype}{list(leaf.shape)}' for path, leaf in target.items()
  }
  for path in (*here, *there):
    if there.get(path) != here.get(path):
      return (
        f'{path} is {there.get(path, "missing")} there and'
        f' {here.get(path, "missing")} here'
      )
  return ''


def named(tree: Any) -> dict[str, Any]:
  """Leaves by path, in order: `{'params/layers/kernel': array, ...}`."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
  """Plain dicts, which orbax writes for any tree.

  `{'a/b': 1, 'a/c': 2}` becomes `{'a': {'b': 1, 'c': 2}}`.
  """
  tree = {}
  for path, leaf in leaves.items():
    *parents, name = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return tree


def like(target: Any, leaves: dict[str, Any]) -> Any:
  """Puts leaves by path into the tree of the target."""
  return jax.tree.unflatten(
    jax.tree.structure(target), [leaves[path] for path in named(target)]
  )


def steps(directory: str) -> list[int]:
  """Steps of the complete checkpoints, damaged or not, oldest first."""
  names = os.listdir(directory)
  return sorted(int(name) for name in names if re.fullmatch('[0-9]+', name))


@contextlib.contextmanager
def one_line(directory: str) -> Iterator[None]:
  """Turns a refusal of the file system into one line for the user."""
  refused = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
  )
  try:
    yield
  except Exception as error:
    number = agreement.error_number(error)
    if number not in refused:
      raise
    raise ValueError(
      f'checkpoints in {directory}: {os.strerror(number)}. Make it a directory'
      ' that you may read and write, or choose another'
    ) from error


def _reason(error: Exception) -> str:
  """One line of at most 200 characters."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return text if len(text) <= 200 else f'{text[:197]}...'
