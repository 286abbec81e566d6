"""Opens directories of checkpoints and closes them after the test."""

import gc
import time

import pytest

from launch.worker import checkpoint


@pytest.fixture
def open_checkpoints(tmp_path):
  """Opens `tmp_path` or a part of it; `.dropped` collects the callbacks."""
  opened = []

  def open_directory(name='', keep_last=3, keep_every=0):
    dropped = []
    checkpoints = checkpoint.Checkpoints(
      str(tmp_path / name),
      checkpoint.CheckpointConfig(1, keep_last, keep_every),
      lambda step, reason: dropped.append((step, reason)),
    )
    checkpoints.dropped = dropped
    opened.append(checkpoints)
    return checkpoints

  yield open_directory
  for checkpoints in opened:
    checkpoints.close()


@pytest.fixture
def abandoned_io():
  """For tests in which orbax fails: it leaves other reads or writes in flight.

  They find their event loop closed, which pytest would report in whichever test
  runs then; such a test also ignores `PytestUnraisableExceptionWarning`.
  """
  yield
  gc.collect()
  time.sleep(0.05)
