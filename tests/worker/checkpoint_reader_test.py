"""Damage gives way to the checkpoint before it, never to a wrong value."""

import os
import random
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from launch.worker import checkpoint

pytestmark = [
  pytest.mark.usefixtures('abandoned_io'),
  pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]


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


def test_a_flipped_byte_never_gives_a_wrong_value(open_checkpoints, tmp_path):
  original = open_checkpoints('original')
  _save(original, 1, 2)
  randomness = random.Random(0)
  fell_back = set()
  for file in _files(tmp_path / 'original' / '2'):
    size = os.path.getsize(file)
    name = os.path.relpath(file, tmp_path / 'original')
    for place in {0, size - 1, randomness.randrange(size)}:
      shutil.copytree(tmp_path / 'original', tmp_path / 'copy')
      _flip(str(tmp_path / 'copy' / name), place)
      restored = open_checkpoints('copy').restore(_state())
      chex.assert_trees_all_equal(restored.state, _state(restored.step))
      assert restored.metadata == {'position': 10 * restored.step}
      if restored.step == 1:
        fell_back.add(name)
      shutil.rmtree(tmp_path / 'copy')
  # The arrays and the metadata themselves lie in these.
  assert '2/metadata/metadata' in fell_back
  assert any('/d/' in name for name in fell_back)


@pytest.mark.parametrize('damage', [_truncate, os.remove])
def test_a_lost_file_falls_back(open_checkpoints, tmp_path, damage):
  _save(open_checkpoints('original'), 1, 2)
  fell_back = 0
  for file in _files(tmp_path / 'original' / '2'):
    name = os.path.relpath(file, tmp_path / 'original')
    shutil.copytree(tmp_path / 'original', tmp_path / 'copy')
    damage(str(tmp_path / 'copy' / name))
    restored = open_checkpoints('copy').restore(_state())
    chex.assert_trees_all_equal(restored.state, _state(restored.step))
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
  open_checkpoints, tmp_path, damage, reason
):
  _save(open_checkpoints(), 1, 2)
  for _ in range(2):
    damage(str(tmp_path / '2'))
    checkpoints = open_checkpoints()
    assert checkpoints.restore(_state()).step == 1
    ((step, text),) = checkpoints.dropped
    assert step == 2
    assert reason in text
    assert '\n' not in text
    assert (tmp_path / '2.corrupt').is_dir()
    with ocp.CheckpointManager(tmp_path) as manager:
      assert manager.latest_step() == 1
    _save(checkpoints, 2)
  assert open_checkpoints().restore(_state()).step == 2


def test_a_changed_array_is_named(open_checkpoints, tmp_path):
  checkpoints = open_checkpoints()
  _save(checkpoints, 1, 2)
  shutil.rmtree(tmp_path / '2' / 'state')
  shutil.copytree(tmp_path / '1' / 'state', tmp_path / '2' / 'state')
  assert checkpoints.restore(_state()).step == 1
  assert checkpoints.dropped == [(2, 'moments/0 differs from its digest')]


def test_if_all_are_damaged_all_stay(open_checkpoints, tmp_path):
  checkpoints = open_checkpoints()
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
def test_another_model_is_refused_and_kept(open_checkpoints, target, message):
  checkpoints = open_checkpoints()
  _save(checkpoints, 1)
  with pytest.raises(ValueError, match=message):
    checkpoints.restore(target)
  assert checkpoints.steps() == [1]


def test_params_of_another_run(open_checkpoints, tmp_path):
  checkpoints = open_checkpoints('run/checkpoints')
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
    chex.assert_trees_all_equal(params, _state(1)['params'])
    assert dropped == [2]
  assert _files(tmp_path) == before
  assert checkpoints.steps() == [1, 2]


def test_params_that_cannot_be_had(open_checkpoints, tmp_path):
  _save(open_checkpoints('run'), 1)
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
