"""One of several processes that save and restore, for their test.

  python -m tests.worker.checkpoint_process NUMBER OF ADDRESS DIRECTORY COMMANDS

Runs the commands, a JSON list of `[name, argument]`, and prints what came of
them as a JSON list: `{'result': ..., 'error': ...}` each.
"""

import glob
import json
import os
import resource
import sys
import time

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np

from launch.worker import agreement
from launch.worker import checkpoint
from launch.worker import processes

# Shape, dtype and spec of the arrays of a state.
_ARRAYS = {
  'params': {
    'matrix': ((64, 2048), np.float32, P('rows', 'columns')),
    'half': ((16, 6), ml_dtypes.bfloat16, P(None, 'columns')),
  },
  'key': ((2,), np.uint32, P()),
  'step': ((), np.int32, P()),
}
# The process that something goes wrong in, and who it may become: nobody.
_UNLUCKY = 1
_NOBODY = 65534


def expected(step: int) -> dict:
  """The state of a step as numpy arrays; random bits, which do not compress."""
  draw = np.random.default_rng(step)

  def make(array):
    shape, dtype, _ = array
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(draw.bytes(size), dtype).reshape(shape)

  return jax.tree.map(make, _ARRAYS, is_leaf=lambda x: isinstance(x, tuple))


def target(mesh: Mesh) -> dict:
  """Shapes, dtypes and places of a state on a mesh of `rows` and `columns`."""
  return jax.tree.map(
    lambda array: jax.ShapeDtypeStruct(
      array[0], array[1], sharding=NamedSharding(mesh, array[2])
    ),
    _ARRAYS,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def is_same(actual: dict, wanted: dict) -> bool:
  """Whether this process's shards are those bits."""
  return all(
    np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
    for array, whole in zip(
      jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True
    )
    for shard in array.addressable_shards
  )


def flip(directory: str, step: int) -> None:
  """Changes one bit in the middle of the largest file of arrays."""
  files = glob.glob(f'{directory}/{step}/state/**/d/*', recursive=True)
  path = max(files, key=os.path.getsize)
  with open(path, 'r+b') as file:
    file.seek(os.path.getsize(path) // 2)
    byte = file.read(1)[0]
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte ^ 0x10]))


class _Commands:
  """What a test can ask for, by the method's name."""

  def __init__(self, directory: str):
    self._directory = directory
    self._dropped = []
    sizes = {4: (2, 2), 2: (1, 2)}[jax.process_count()]
    self._mesh = Mesh(
      np.array(jax.devices()).reshape(sizes), ('rows', 'columns')
    )
    self._is_unlucky = jax.process_index() == _UNLUCKY
    self._checkpoints = self._open()

  def _open(self) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(
      self._directory,
      checkpoint.CheckpointConfig(every=1, keep_last=2, keep_every=0),
      lambda step, reason: self._dropped.append(step),
    )

  def save(self, step):
    """The first process sees the commit while all poll; then all know it."""
    self._begin(step)
    deadline = time.monotonic() + 300
    seen = self._checkpoints.saved()
    while jax.process_index() == 0 and not seen:
      assert time.monotonic() < deadline
      seen = self._checkpoints.saved()
    self._checkpoints.wait()
    return seen + self._checkpoints.saved()

  def _begin(self, step):
    wanted = expected(step)
    state = jax.tree.map(
      lambda whole, place: jax.make_array_from_callback(
        whole.shape, place.sharding, lambda index: whole[index]
      ),
      wanted,
      target(self._mesh),
    )
    self._checkpoints.save(step, state, {'position': 10 * step})

  def save_with_one_that_cannot(self, step):
    """One process may not write large files, as if its disk was full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if self._is_unlucky:
      resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))
    try:
      self._begin(step)
      while self._is_unlucky and not self._checkpoints.failed:
        assert self._checkpoints.saved() == []
      self._checkpoints.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

  def restore(self, _):
    self._dropped.clear()
    restored = self._checkpoints.restore(target(self._mesh))
    places = jax.tree.map(lambda array: array.sharding, restored.state)
    assert places == jax.tree.map(
      lambda leaf: leaf.sharding, target(self._mesh)
    )
    return {
      'step': restored.step,
      'metadata': restored.metadata,
      'same': is_same(restored.state, expected(restored.step)),
      'dropped': list(self._dropped),
    }

  def restore_params(self, directory):
    params = checkpoint.restore_params(
      directory, target(self._mesh)['params'], None
    )
    return is_same(params, expected(2)['params'])

  def restore_damaged(self, _):
    return self.restore(_)

  def restore_with_one_that_may_not_read(self, _):
    if self._is_unlucky:
      os.seteuid(_NOBODY)
    try:
      return self.restore(_)
    finally:
      if self._is_unlucky:
        os.seteuid(0)

  def list(self, _):
    return agreement.of_first(lambda: sorted(os.listdir(self._directory)))

  def list_at_the_end(self, _):
    self._checkpoints.close()
    return self.list(_)

  def flip(self, step):
    if jax.process_index() == 0:
      flip(self._directory, step)


def main() -> None:
  number, count, address, directory, commands = sys.argv[1:]
  processes.join(int(number), int(count), address, address, timeout_s=300)
  runner = _Commands(directory)
  outcomes = []
  for name, argument in json.loads(commands):
    outcome = {'result': None, 'error': None}
    try:
      outcome['result'] = getattr(runner, name)(argument)
    except Exception as error:
      outcome['error'] = f'{type(error).__name__}: {error}'
    outcomes.append(outcome)
  print(json.dumps(outcomes), flush=True)
  processes.leave()


if __name__ == '__main__':
  main()
