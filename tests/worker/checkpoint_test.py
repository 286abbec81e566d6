"""What was saved comes back bit by bit, or an older one does, or a clear no."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from jaxllm import settings
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib
from launch.worker import checkpoint

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _config(**changes):
  values = {'every': 1, 'keep_last': 3, 'keep_every': 0}
  return settings.build(
    checkpoint.CheckpointConfig, values | changes, 'checkpoint'
  )


def _state(seed=0):
  random_state = np.random.default_rng(seed)
  return {
    'params': {'w': jnp.asarray(random_state.normal(size=(4, 8)), jnp.float32)},
    'moments': [jnp.asarray(random_state.normal(size=5), jnp.bfloat16)],
    'step': jnp.asarray(seed, jnp.int32),
    'empty': optax.MaskedNode(),
  }


def _save(checkpoints, *steps):
  for step in steps:
    checkpoints.save(step, _state(step), {'position': 10 * step})
    checkpoints.wait()


def _assert_same_bits(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _train_state():
  """POET's and AdamW's state over the decoder's paths, all bits random."""
  zeros = lambda *shape: jnp.zeros(shape)
  params = {
    'embed': {'embedding': zeros(8, 4)},
    'layers': {
      'attention': {'q_proj': {'kernel': zeros(2, 4, 4), 'bias': zeros(2, 4)}},
      'mlp': {'up_proj': {'kernel': zeros(2, 4, 8)}},
      'input_norm': {'scale': zeros(2, 4)},
    },
    'final_norm': {'scale': zeros(4)},
  }
  adam = {
    'learning_rate': 0.1,
    'beta1': 0.9,
    'beta2': 0.95,
    'epsilon': 1e-8,
    'clip_norm': 1.0,
  }
  config = {
    'name': 'poet',
    'warmup_steps': 1,
    'final_fraction': 0.1,
    'adamw': {**adam, 'weight_decay': 0.1},
    'muon': {'learning_rate': 0.1, 'beta': 0.9, 'weight_decay': 0.1},
    'poet': {
      **adam,
      'inner': 'adam',
      'alternate_sides': False,
      'clip_ramp_steps': 0,
      'block_size': 4,
      'fraction': 0.0,
      'neumann_terms': 3,
      'merge_every': 4,
      'resample_every': 1,
      'reset_inner': True,
      'partitions': 1,
      'seed': 0,
    },
  }
  optimizer = optimizers.build(
    settings.build(optimizers.OptimizerConfig, config, 'optimizer'), 10
  )
  state = step_lib.init_state(params, optimizer, 0)
  draw = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(
      np.frombuffer(draw.bytes(x.nbytes), x.dtype).reshape(x.shape)
    ),
    state,
  )


def test_a_training_state_comes_back(open_checkpoints):
  state = _train_state()
  checkpoints = open_checkpoints()
  checkpoints.save(7, state, {'position': 70, 'rate': 0.1, 'nothing': None})
  checkpoints.close()
  restored = open_checkpoints().restore(jax.eval_shape(lambda: state))
  assert restored.step == 7
  assert restored.metadata == {'position': 70, 'rate': 0.1, 'nothing': None}
  assert jax.tree.structure(restored.state) == jax.tree.structure(state)
  _assert_same_bits(restored.state, state)


def test_no_checkpoint_is_none(open_checkpoints):
  assert open_checkpoints().restore(_state()) is None


def test_the_newest_is_restored_and_each_is_reported_once(open_checkpoints):
  checkpoints = open_checkpoints()
  assert checkpoints.saved() == []
  _save(checkpoints, 1, 2)
  assert checkpoints.saved() == [1, 2]
  assert checkpoints.saved() == []
  restored = checkpoints.restore(_state())
  assert (restored.step, restored.metadata) == (2, {'position': 20})
  _assert_same_bits(restored.state, _state(2))


def _poll(checkpoints):
  saved = []
  deadline = time.monotonic() + 20
  while not saved:
    assert time.monotonic() < deadline
    time.sleep(0.01)
    saved = checkpoints.saved()
  return saved


def test_saved_reports_without_waiting(open_checkpoints):
  checkpoints = open_checkpoints()
  checkpoints.save(1, _state(), {})
  assert _poll(checkpoints) == [1]
  assert checkpoints.steps() == [1]


def test_a_step_is_saved_once(open_checkpoints):
  checkpoints = open_checkpoints()
  _save(checkpoints, 1)
  with pytest.raises(ValueError, match=r'/1 exists: save each step once'):
    checkpoints.save(1, _state(), {})


def test_donated_buffers_are_saved_as_they_were(open_checkpoints):
  step = jax.jit(
    lambda state: jax.tree.map(lambda x: x * 3 + 1, state), donate_argnums=0
  )
  make = lambda: {'w': jnp.arange(1 << 19, dtype=jnp.float32) / 7}
  checkpoints = open_checkpoints()
  state = make()
  checkpoints.save(1, state, {})
  for _ in range(3):
    state = step(state)
  checkpoints.wait()
  _assert_same_bits(checkpoints.restore(make()).state, make())


@pytest.mark.parametrize('there', [P('data', 'model'), P(None, 'data'), P()])
def test_sharded_arrays_come_back_in_any_sharding(open_checkpoints, there):
  mesh = jax.make_mesh(
    (4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  here = NamedSharding(mesh, P('data', 'model'))
  array = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 3
  checkpoints = open_checkpoints()
  checkpoints.save(1, {'x': jax.device_put(array, here)}, {})
  checkpoints.wait()
  sharding = NamedSharding(mesh, there)
  target = {'x': jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
  restored = checkpoints.restore(target).state
  assert restored['x'].sharding == sharding
  _assert_same_bits(restored, {'x': array})


def test_the_last_and_every_third_are_kept(open_checkpoints, tmp_path):
  checkpoints = open_checkpoints(keep_last=2, keep_every=3)
  _save(checkpoints, *range(1, 9))
  assert checkpoints.steps() == [3, 6, 7, 8]
  assert sorted(os.listdir(tmp_path)) == ['3', '6', '7', '8']


def test_what_a_killed_process_left_is_removed(open_checkpoints, tmp_path):
  (tmp_path / '5.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  (tmp_path / '4.deleting').mkdir()
  open_checkpoints()
  assert os.listdir(tmp_path) == []


_SAVE_FOR_EVER = """
import itertools, sys
import jax.numpy as jnp
from launch.worker import checkpoint
config = checkpoint.CheckpointConfig(every=1, keep_last=2, keep_every=0)
checkpoints = checkpoint.Checkpoints(sys.argv[1], config, None)
for step in itertools.count(1):
  state = {
    'w': jnp.full((300, 1000), step, jnp.float32),
    'b': jnp.full(100, step, jnp.int32),
  }
  checkpoints.save(step, state, {'position': step})
  for done in checkpoints.saved():
    print(done, flush=True)
"""


@pytest.mark.parametrize('seed', range(3))
def test_kill_9_leaves_the_newest_committed(open_checkpoints, tmp_path, seed):
  child = subprocess.Popen(
    [sys.executable, '-c', _SAVE_FOR_EVER, str(tmp_path)],
    stdout=subprocess.PIPE,
    cwd=_ROOT,
  )
  with child:
    acknowledged = [int(child.stdout.readline()) for _ in range(2)]
    time.sleep(random.Random(seed).uniform(0, 0.3))
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout]
  checkpoints = open_checkpoints()
  target = {
    'w': jax.ShapeDtypeStruct((300, 1000), jnp.float32),
    'b': jax.ShapeDtypeStruct((100,), jnp.int32),
  }
  restored = checkpoints.restore(target)
  assert restored.step >= acknowledged[-1]
  assert restored.metadata == {'position': restored.step}
  for leaf in jax.tree.leaves(restored.state):
    np.testing.assert_array_equal(leaf, restored.step)
  assert checkpoints.dropped == []
  assert all(name.isdigit() for name in os.listdir(tmp_path))


def _random_bytes(seed, size):
  # Random, so that compression does not help.
  data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
  return {'w': jnp.asarray(data)}


@pytest.fixture
def small_disk(tmp_path):
  directory = tmp_path / 'disk'
  directory.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', str(directory)]
  if not shutil.which('mount') or subprocess.run(mount).returncode:
    pytest.skip('mounting a small disk is not permitted here')
  yield directory
  # Lazily, as a write that failed late may still hold a file open.
  subprocess.run(['umount', '-l', str(directory)], check=True)


@pytest.mark.usefixtures('abandoned_io')
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_full_disk_is_reported_and_cleared(open_checkpoints, small_disk):
  checkpoints = open_checkpoints('disk')
  state = _random_bytes(0, 2**20)
  checkpoints.save(1, state, {})
  checkpoints.wait()
  checkpoints.save(2, _random_bytes(1, 2**22), {})
  with pytest.raises(OSError, match='step 2 was not written') as error:
    checkpoints.wait()
  assert error.value.errno == errno.ENOSPC
  assert error.value.filename == str(small_disk)
  assert os.listdir(small_disk) == ['1']
  assert checkpoints.saved() == [1]
  # Room again: the same step, smaller.
  checkpoints.save(2, _random_bytes(1, 2**20), {})
  checkpoints.wait()
  assert checkpoints.saved() == [2]
  _assert_same_bits(checkpoints.restore(state).state, _random_bytes(1, 2**20))


@pytest.fixture
def small_files():
  """Files may not grow beyond 256 KiB meanwhile."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

  def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

  yield limit
  limit(soft)


@pytest.mark.usefixtures('abandoned_io')
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_failed_write_is_an_oserror_and_counts_not(
  open_checkpoints, tmp_path, small_files
):
  checkpoints = open_checkpoints()
  state = _random_bytes(0, 2**20)
  _save(checkpoints, 1)
  assert checkpoints.saved() == [1]
  small_files(2**18)
  checkpoints.save(2, state, {})
  with pytest.raises(OSError, match='step 2 was not written') as error:
    _poll(checkpoints)
  assert error.value.errno == errno.EFBIG
  small_files(resource.RLIM_INFINITY)
  assert checkpoints.steps() == [1]
  assert os.listdir(tmp_path) == ['1']
  assert checkpoints.saved() == []
  assert checkpoints.restore(_state()).step == 1


def test_a_directory_that_is_a_file_is_one_line(open_checkpoints, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match=r'checkpoints in .*/file.*: .*Make it'):
    open_checkpoints('file/checkpoints')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'keep_last': 1}, r'keep_last=1: set it to a whole number of at least 2'),
    ({'every': 0}, r'every=0: set'),
    ({'keep_every': 0.5}, r'keep_every=0\.5 must be of type int'),
  ],
)
def test_bad_settings_are_named(changes, message):
  with pytest.raises(ValueError, match=message):
    _config(**changes)
