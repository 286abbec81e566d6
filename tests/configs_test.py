"""Every config builds abstractly, with the published numbers of parameters."""

import importlib
import pathlib

import jax
import numpy as np
import pytest

from jaxllm import poet
from jaxllm.model import decoder
from launch.control import run_config
from launch.worker import program as program_lib
from launch.worker import run_settings

_NAMES = sorted(
  path.stem
  for path in (pathlib.Path(__file__).parents[1] / 'configs').glob('*.py')
)
# Trainable parameters of the decoder's matrices, in millions: POET-BS with
# b = 256, 128, 64 (arXiv 2506.08001, table 2).
_PUBLISHED = {
  'poet_60m': (9.66, 4.81, 2.39),
  'poet_130m': (22.33, 11.12, 5.52),
  'poet_350m': (60.32, 30.04, 14.90),
  # The table prints 118.26 for b = 256; (m + n)(b - 1) / 2 summed is 118.287.
  'poet_1b': (118.287, 58.91, 29.22),
}
# The same of POET-FS with fraction 1/2, 1/4, 1/8, which the paper trained at
# AdamW's FFN width (at 1.3B the counts are those of 5464, not of 5461).
_PUBLISHED_FULLY = {
  'poet_60m': (1376, 8.54, 2.13, 0.53),
  'poet_130m': (2048, 28.56, 7.13, 1.78),
  'poet_350m': (2736, 101.86, 25.44, 6.34),
  'poet_1b': (5464, 406.88, 101.66, 25.39),
}


def _config(name: str):
  return importlib.import_module(f'configs.{name}').get_config()


def _abstract(config):
  settings = run_settings.from_plain(run_config.to_plain(config))
  program = program_lib.build(settings, jax.devices())
  return settings, jax.eval_shape(program.initial_state, 0)


@pytest.mark.parametrize('name', _NAMES)
def test_config_builds_and_every_leaf_has_a_shape(name):
  settings, state = _abstract(_config(name))
  assert settings.train.steps > 0
  assert all(leaf.size > 0 for leaf in jax.tree.leaves(state.params))


def _coordinates_in_millions(config) -> float:
  _, state = _abstract(config)
  inner = state.opt_state.inner_states['poet'].inner_state
  assert isinstance(inner, poet.PoetState)
  return decoder.count_parameters(inner.rotations) / 1e6


@pytest.mark.parametrize('name', _PUBLISHED)
def test_trainable_parameters_equal_the_published_table(name):
  config = _config(name)
  for block_size, published in zip(
    (256, 128, 64), _PUBLISHED[name], strict=True
  ):
    config.optimizer.poet.block_size = block_size
    count = _coordinates_in_millions(config)
    assert count == pytest.approx(published, abs=0.006), block_size


@pytest.mark.parametrize('name', _PUBLISHED_FULLY)
def test_fully_stochastic_parameters_equal_the_published_table(name):
  config = _config(name)
  width, *counts = _PUBLISHED_FULLY[name]
  config.model.intermediate_size = width
  config.optimizer.poet.block_size = 0
  for fraction, published in zip((1 / 2, 1 / 4, 1 / 8), counts, strict=True):
    config.optimizer.poet.fraction = fraction
    count = _coordinates_in_millions(config)
    assert count == pytest.approx(published, abs=0.006), fraction


def test_adamw_trains_the_published_linear_parameters_at_its_own_width():
  """AdamW's row of table 2 has FFN 1376 where POET-BS has 1280."""
  config = _config('poet_60m')
  config.model.intermediate_size = 1376
  config.optimizer.name = 'adamw'
  _, state = _abstract(config)
  kernels = [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    if 'proj' in jax.tree_util.keystr(path)
  ]
  total = sum(int(np.prod(kernel.shape)) for kernel in kernels) / 1e6
  assert total == pytest.approx(25.30, abs=0.006)


def test_quickstart_has_two_to_four_million_parameters():
  _, state = _abstract(_config('quickstart'))
  assert 2e6 <= decoder.count_parameters(state.params) <= 4e6
