"""A training state that one mesh has saved is restored on any other."""

import json

import jax
import numpy as np
import pytest

from jaxllm import sharding
from jaxllm.train import step as step_lib
from launch.worker import checkpoint
from launch.worker import program as program_lib
from launch.worker import run_settings
from tests import tiny_config


def _target(sizes: tuple[int, int, int]) -> step_lib.TrainState:
  """Shapes and places of a tiny model's state under POET."""
  config = tiny_config.get_config('nowhere')
  config.optimizer.poet.partitions = 4
  config.mesh = dict(zip(sharding.AXES, sizes, strict=True))
  settings = run_settings.from_plain(json.loads(config.to_json()))
  devices = jax.devices()[: int(np.prod(sizes))]
  return program_lib.build(settings, devices).state_shapes(0)


def _random_state(target: step_lib.TrainState) -> step_lib.TrainState:
  """All bits random."""
  draw = np.random.default_rng(0)

  def make(leaf):
    data = draw.bytes(leaf.size * leaf.dtype.itemsize)
    whole = np.frombuffer(data, leaf.dtype).reshape(leaf.shape)
    return jax.device_put(whole, leaf.sharding)

  return jax.tree.map(make, target)


def _assert_restored(actual, expected, target):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b, place in zip(
    *map(jax.tree.leaves, (actual, expected, target)), strict=True
  ):
    assert a.sharding == place.sharding
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _digests(directory, step):
  with open(directory / str(step) / 'metadata' / 'metadata') as file:
    return json.load(file)['digests']


def test_a_state_goes_from_mesh_to_mesh(open_checkpoints, tmp_path):
  checkpoints = open_checkpoints()
  state = original = _random_state(_target((8, 1, 1)))
  assert len(jax.tree.leaves(state)) > 80
  for step, sizes in enumerate([(2, 2, 2), (1, 1, 1)]):
    checkpoints.save(step, state, {'position': step})
    checkpoints.wait()
    target = _target(sizes)
    restored = checkpoints.restore(target)
    assert (restored.step, restored.metadata) == (step, {'position': step})
    _assert_restored(restored.state, original, target)
    state = restored.state
  assert _digests(tmp_path, 1) == _digests(tmp_path, 0)
  target = _target((1, 4, 1)).params
  params = checkpoint.restore_params(str(tmp_path), target, pytest.fail)
  _assert_restored(params, original.params, target)
