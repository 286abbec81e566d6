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
import orbax.checkpoint as ocp
import pytest

from jaxllm.train import optimizers
from jaxllm.train import step as step_lib
from launch.worker import checkpoint

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _config(**changes):
  values = {'every': 1, 'keep_last': 3, 'keep_every': 0}
  return checkpoint.CheckpointConfig.from_dict(values | changes)


@pytest.fixture
def open_(tmp_path):
  """Opens `tmp_path` or a part of it; `.dropped` collects the callbacks."""
  opened = []

  def open_directory(name='', **changes):
    dropped = []
    checkpoints = checkpoint.Checkpoints(
      str(tmp_path / name),
      _config(**changes),
      lambda step, reason: dropped.append((step, reason)),
    )
    checkpoints.dropped = dropped
    opened.append(checkpoints)
    return checkpoints

  yield open_directory
  for checkpoints in opened:
    checkpoints.close()


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


def _train_state(name):
  """A state of each optimizer on params with the decoder's paths."""
  normal = iter(jax.random.split(jax.random.key(0), 9))
  draw = lambda *shape: jax.random.normal(next(normal), shape)
  params = {
    'embed': {'embedding': draw(8, 4)},
    'layers': {
      'attention': {'q_proj': {'kernel': draw(2, 4, 4), 'bias': draw(2, 4)}},
      'mlp': {'up_proj': {'kernel': draw(2, 4, 8)}},
      'input_norm': {'scale': draw(2, 4)},
    },
    'final_norm': {'scale': draw(4)},
  }
  adam = {'beta1': 0.9, 'beta2': 0.95, 'epsilon': 1e-8, 'clip_norm': 1.0}
  config = optimizers.OptimizerConfig.from_dict(
    {
      'name': name,
      'warmup_steps': 1,
      'final_fraction': 0.1,
      'adamw': {**adam, 'learning_rate': 0.1, 'weight_decay': 0.1},
      'muon': {'learning_rate': 0.1, 'beta': 0.9, 'weight_decay': 0.1},
      'poet': {
        **adam,
        'learning_rate': 0.1,
        'block_size': 4,
        'neumann_terms': 3,
        'merge_every': 4,
        'reset_inner': True,
        'partitions': 1,
        'seed': 0,
      },
    }
  )
  optimizer = optimizers.build(config, 10)

  @jax.jit
  def advance(params):
    state = step_lib.init_state(params, optimizer, 0)
    gradients = jax.tree.map(jnp.cos, state.params)
    updates, opt_state = optimizer.transform.update(
      gradients, state.opt_state, state.params
    )
    params = optimizer.assign(state.params, updates, opt_state)
    return state._replace(params=params, opt_state=opt_state)

  return advance(params)


@pytest.mark.parametrize('name', ['adamw', 'poet'])
def test_a_training_state_comes_back(open_, name):
  state = _train_state(name)
  checkpoints = open_()
  checkpoints.save(7, state, {'position': 70, 'rate': 0.1, 'nothing': None})
  checkpoints.close()
  target = jax.eval_shape(lambda: state)
  restored = open_().restore(target)
  assert restored.step == 7
  assert restored.metadata == {'position': 70, 'rate': 0.1, 'nothing': None}
  _assert_same_bits(restored.state, state)


def test_no_checkpoint_is_none(open_):
  assert open_().restore(_state()) is None


def test_the_newest_is_restored_and_each_is_reported_once(open_):
  checkpoints = open_()
  assert checkpoints.saved() == []
  _save(checkpoints, 1, 2)
  assert checkpoints.saved() == [1, 2]
  assert checkpoints.saved() == []
  restored = checkpoints.restore(_state())
  assert (restored.step, restored.metadata) == (2, {'position': 20})
  _assert_same_bits(restored.state, _state(2))


def test_saved_reports_without_waiting(open_):
  checkpoints = open_()
  checkpoints.save(1, _state(), {})
  deadline = time.monotonic() + 20
  while not (saved := checkpoints.saved()):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  assert saved == [1]
  assert checkpoints.steps() == [1]


def test_a_step_is_saved_once(open_):
  checkpoints = open_()
  _save(checkpoints, 1)
  with pytest.raises(ValueError, match=r'/1 exists: save each step once'):
    checkpoints.save(1, _state(), {})


def test_donated_buffers_are_saved_as_they_were(open_):
  step = jax.jit(
    lambda state: jax.tree.map(lambda x: x * 3 + 1, state), donate_argnums=0
  )
  make = lambda: {'w': jnp.arange(1 << 19, dtype=jnp.float32) / 7}
  checkpoints = open_()
  state = make()
  checkpoints.save(1, state, {})
  for _ in range(3):
    state = step(state)
  checkpoints.wait()
  _assert_same_bits(checkpoints.restore(make()).state, make())


def test_saving_leaves_nothing_that_prevents_donation(open_):
  checkpoints = open_()
  state = {'w': jnp.arange(1 << 16, dtype=jnp.float32)}
  checkpoints.save(1, state, {})
  checkpoints.wait()
  restored = checkpoints.restore(state).state
  for tree in (state, restored):
    place = tree['w'].unsafe_buffer_pointer()
    out = jax.jit(lambda x: x + 1, donate_argnums=0)(tree['w'])
    assert out.unsafe_buffer_pointer() == place


@pytest.mark.parametrize('there', [P('data', 'model'), P(None, 'data'), P()])
def test_sharded_arrays_come_back_in_any_sharding(open_, there):
  mesh = jax.make_mesh(
    (4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  here = NamedSharding(mesh, P('data', 'model'))
  array = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 3
  checkpoints = open_()
  checkpoints.save(1, {'x': jax.device_put(array, here)}, {})
  checkpoints.wait()
  sharding = NamedSharding(mesh, there)
  target = {'x': jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
  restored = checkpoints.restore(target).state
  assert restored['x'].sharding == sharding
  _assert_same_bits(restored, {'x': array})


def _files(directory):
  return sorted(
    os.path.join(folder, name)
    for folder, _, names in os.walk(directory)
    for name in names
  )


def _flip(path, place):
  with open(path, 'r+b') as file:
    file.seek(place)
    byte = file.read(1)[0]
    file.seek(place)
    file.write(bytes([byte ^ 0x10]))


def _truncate(path):
  os.truncate(path, os.path.getsize(path) // 2)


def _damage_each_file(tmp_path, damage):
  """Damages each file of a checkpoint in a copy; yields what restore gives."""
  for file in _files(tmp_path / 'original' / '2'):
    copy = tmp_path / 'copy'
    shutil.copytree(tmp_path / 'original', copy)
    relative = os.path.relpath(file, tmp_path / 'original')
    for outcome in damage(str(copy / relative)):
      yield relative, outcome
    shutil.rmtree(copy, ignore_errors=True)


def test_a_flipped_byte_never_gives_a_wrong_value(open_, tmp_path):
  original = open_('original')
  _save(original, 1, 2)
  randomness = random.Random(0)
  fell_back = set()
  for file in _files(tmp_path / 'original' / '2'):
    size = os.path.getsize(file)
    name = os.path.relpath(file, tmp_path / 'original')
    for place in {0, size - 1, randomness.randrange(size)}:
      shutil.copytree(tmp_path / 'original', tmp_path / 'copy')
      _flip(str(tmp_path / 'copy' / name), place)
      restored = open_('copy').restore(_state())
      _assert_same_bits(restored.state, _state(restored.step))
      assert restored.metadata == {'position': 10 * restored.step}
      if restored.step == 1:
        fell_back.add(name)
      shutil.rmtree(tmp_path / 'copy')
  # The arrays and the metadata themselves lie in these.
  assert '2/metadata/metadata' in fell_back
  assert any('/d/' in name for name in fell_back)


@pytest.mark.parametrize('damage', [_truncate, os.remove])
def test_a_lost_file_falls_back(open_, tmp_path, damage):
  _save(open_('original'), 1, 2)
  fell_back = 0
  for file in _files(tmp_path / 'original' / '2'):
    name = os.path.relpath(file, tmp_path / 'original')
    shutil.copytree(tmp_path / 'original', tmp_path / 'copy')
    damage(str(tmp_path / 'copy' / name))
    restored = open_('copy').restore(_state())
    _assert_same_bits(restored.state, _state(restored.step))
    fell_back += restored.step == 1
    shutil.rmtree(tmp_path / 'copy')
  assert fell_back >= 3


def _empty_directory(path):
  shutil.rmtree(path)
  os.mkdir(path)


def _broken_json(path):
  with open(os.path.join(path, 'metadata', 'metadata'), 'w') as file:
    file.write('{"position": ')


def _other_metadata(path):
  file = os.path.join(path, 'metadata', 'metadata')
  with open(file) as stream:
    text = stream.read()
  assert '"position": 20' in text
  with open(file, 'w') as stream:
    stream.write(text.replace('"position": 20', '"position": 21'))


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [
    (_empty_directory, 'No such file'),
    (_broken_json, 'Expecting value'),
    (_other_metadata, 'metadata differs from its digest'),
  ],
)
def test_a_damaged_one_is_put_aside_and_its_step_free_again(
  open_, tmp_path, damage, reason
):
  _save(open_(), 1, 2)
  for _ in range(2):
    damage(str(tmp_path / '2'))
    checkpoints = open_()
    assert checkpoints.restore(_state()).step == 1
    ((step, text),) = checkpoints.dropped
    assert step == 2
    assert reason in text
    assert '\n' not in text
    assert (tmp_path / '2.corrupt').is_dir()
    with ocp.CheckpointManager(tmp_path) as manager:
      assert manager.latest_step() == 1
    _save(checkpoints, 2)
  assert open_().restore(_state()).step == 2


def test_a_changed_array_is_named(open_, tmp_path):
  checkpoints = open_()
  _save(checkpoints, 1, 2)
  shutil.rmtree(tmp_path / '2' / 'state')
  shutil.copytree(tmp_path / '1' / 'state', tmp_path / '2' / 'state')
  assert checkpoints.restore(_state()).step == 1
  assert checkpoints.dropped == [(2, 'moments/0 differs from its digest')]


def test_if_all_are_damaged_all_stay(open_, tmp_path):
  checkpoints = open_()
  _save(checkpoints, 1, 2)
  for step in (1, 2):
    _empty_directory(tmp_path / str(step))
  for _ in range(2):
    with pytest.raises(
      ValueError, match=r'all checkpoints in .* move the directory away'
    ):
      checkpoints.restore(_state())
  assert checkpoints.steps() == [1, 2]
  assert checkpoints.dropped == []


def _other(**changes):
  return {**_state(), **changes}


@pytest.mark.parametrize(
  ('target', 'message'),
  [
    (
      _other(params={'w': jnp.zeros((4, 9))}),
      r'params/w is float32\[4, 8\] there and float32\[4, 9\] here',
    ),
    (
      _other(params={'w': jnp.zeros((4, 8), jnp.bfloat16)}),
      r'params/w is float32\[4, 8\] there and bfloat16\[4, 8\] here',
    ),
    (
      _other(more=jnp.zeros(1)),
      r'more is missing there and float32\[1\] here',
    ),
    (_other(moments=[]), r'moments/0 is bfloat16\[5\] there and missing here'),
  ],
)
def test_another_model_is_refused_and_kept(open_, target, message):
  checkpoints = open_()
  _save(checkpoints, 1)
  with pytest.raises(ValueError, match=message):
    checkpoints.restore(target)
  assert checkpoints.steps() == [1]


def test_the_last_and_every_third_are_kept(open_):
  checkpoints = open_(keep_last=2, keep_every=3)
  _save(checkpoints, *range(1, 9))
  assert checkpoints.steps() == [3, 6, 7, 8]
  assert sorted(os.listdir(checkpoints._directory)) == ['3', '6', '7', '8']


def test_what_a_killed_process_left_is_removed(open_, tmp_path):
  (tmp_path / '5.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  (tmp_path / '4.deleting').mkdir()
  open_()
  assert os.listdir(tmp_path) == []


_SAVE_FOR_EVER = """
import itertools, sys
import jax.numpy as jnp
from launch.worker import checkpoint
config = checkpoint.CheckpointConfig(every=1, keep_last=2, keep_every=0)
checkpoints = checkpoint.Checkpoints(sys.argv[1], config, None)
for step in itertools.count(1):
  state = {'w': jnp.full((300, 1000), step, jnp.float32), 'b': jnp.zeros(step)}
  state['b'] = jnp.full(100, step, jnp.int32)
  checkpoints.save(step, state, {'position': step})
  for done in checkpoints.saved():
    print(done, flush=True)
"""


@pytest.mark.parametrize('seed', range(3))
def test_kill_9_leaves_the_newest_committed(open_, tmp_path, seed):
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
  checkpoints = open_()
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
  if not shutil.which('mount') or subprocess.run(mount, stderr=-1).returncode:
    pytest.skip('mounting a small disk is not permitted here')
  yield directory
  subprocess.run(['umount', str(directory)], check=True)


def test_a_full_disk_is_reported_and_cleared(open_, small_disk):
  checkpoints = open_('disk')
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


def test_a_failed_write_is_an_oserror_and_counts_not(open_, small_files):
  checkpoints = open_()
  state = _random_bytes(0, 2**20)
  _save(checkpoints, 1)
  small_files(2**18)
  checkpoints.save(2, state, {})
  with pytest.raises(OSError, match='step 2 was not written') as error:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
      checkpoints.saved()
      time.sleep(0.01)
  assert error.value.errno == errno.EFBIG
  small_files(resource.RLIM_INFINITY)
  assert checkpoints.steps() == [1]
  assert os.listdir(checkpoints._directory) == ['1']
  assert checkpoints.saved() == [1]
  assert checkpoints.restore(_state()).step == 1


def test_params_of_another_run(open_, tmp_path):
  checkpoints = open_('run/checkpoints')
  _save(checkpoints, 1, 2)
  _empty_directory(tmp_path / 'run' / 'checkpoints' / '2')
  before = _files(tmp_path)
  for directory in ('run', 'run/checkpoints'):
    dropped = []
    params = checkpoint.restore_params(
      str(tmp_path / directory),
      {'w': jax.ShapeDtypeStruct((4, 8), jnp.float32)},
      lambda step, reason, dropped=dropped: dropped.append(step),
    )
    _assert_same_bits(params, _state(1)['params'])
    assert dropped == [2]
  assert _files(tmp_path) == before
  assert checkpoints.steps() == [1, 2]


def test_params_that_cannot_be_had(open_, tmp_path):
  _save(open_('run'), 1)
  (tmp_path / 'empty').mkdir()
  for name, shape, message in (
    ('nowhere', (4, 8), 'is no directory: name the workdir'),
    ('empty', (4, 8), 'holds no checkpoint: name the workdir'),
    ('run', (4, 7), r'params/w is float32\[4, 8\] there and float32\[4, 7\]'),
  ):
    with pytest.raises(ValueError, match=message):
      checkpoint.restore_params(
        str(tmp_path / name), {'w': jnp.zeros(shape)}, pytest.fail
      )


def test_a_directory_that_is_a_file_is_one_line(open_, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match=r'checkpoints in .*/file.*: .*Make it'):
    open_('file/checkpoints')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'keep_last': 1}, r'keep_last=1: set it to a whole number of at least 2'),
    ({'every': 0}, r'every=0: set'),
    ({'keep_every': 0.5}, r'keep_every=0\.5: set'),
    ({'keep': 3}, r'unknown keep; the names are every, keep_last, keep_every'),
  ],
)
def test_bad_settings_are_named(changes, message):
  with pytest.raises(ValueError, match=message):
    _config(**changes)


def test_a_missing_setting_is_named():
  with pytest.raises(ValueError, match='missing every, keep_every; add them'):
    checkpoint.CheckpointConfig.from_dict({'keep_last': 2})
