"""Writes one checkpoint at a time in the background, by all processes together.

Orbax's threads write every process's shards, meet, and let the first process
commit. What fails in one process ends the write in all of them: it is told to
the threads that wait for that process.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp

from launch.worker import agreement
from launch.worker import checkpoint_reader

# A write that takes longer has failed.
_TIMEOUT_S = 600
# How often the threads meet: when all shards are written, and when the first
# process has committed them.
_MEETINGS = 2


class Writer:
  """Orbax's asynchronous checkpointer, which never waits for a failed peer.

  All processes make one and begin and finish the same writes.
  """

  def __init__(self):
    # Named, the processes meet at the coordination service and not, as by
    # default, in a collective of the devices, which may be busy with a step.
    processes = ocp.options.MultiprocessingOptions(
      active_processes=set(range(jax.process_count()))
    )
    # The caller looks whether the directory exists, in the first process: in
    # others a network file system would remember that it did not.
    files = ocp.options.FileOptions(skip_sync_file_validations=True)
    self._orbax = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(
          multiprocessing_options=processes, file_options=files
        )
      ),
      async_options=ocp.AsyncOptions(
        timeout_secs=_TIMEOUT_S, barrier_sync_fn=self._meet
      ),
      multiprocessing_options=processes,
      file_options=files,
    )
    self._barriers = agreement.Barriers(_MEETINGS)
    self._failure: Exception | None = None

  @property
  def failed(self) -> bool:
    """Whether `look` has found a failure, which `finish` will raise."""
    return self._failure is not None

  def begin(
    self, path: str, state: dict[str, Any], metadata: dict[str, Any]
  ) -> None:
    """Starts to write; the write before must be finished.

    Args:
      path: a directory that does not exist; it appears when all is written.
      state: arrays by path.
      metadata: JSON.

    Raises:
      Exception: this process could not begin; the others fail in `finish`.
    """
    self._barriers = agreement.Barriers(_MEETINGS)
    try:
      self._orbax.save(
        path,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(checkpoint_reader.nested(state)),
          metadata=ocp.args.JsonSave(metadata),
        ),
      )
    except Exception as error:
      self._barriers.fail(error)
      raise

  def look(self) -> None:
    """Takes note of a failure in this process, without waiting."""
    try:
      self._orbax.check_for_errors()
    except Exception as error:
      self._failure = error

  def finish(self) -> None:
    """Returns when the write is committed.

    Raises:
      Exception: it failed, in this process or in another one.
    """
    failure, self._failure = self._failure, None
    try:
      if failure is not None:
        raise failure
      self._orbax.wait_until_finished()
    except Exception as error:
      self._barriers.fail(error)
      raise

  def close(self) -> None:
    """Waits for orbax's thread and ends it."""
    self._orbax.close()

  def _meet(self, *, key: str, timeout_ms: int) -> None:
    del key  # of orbax; the same for every write of a step
    self._barriers.wait(timeout_ms / 1000)
