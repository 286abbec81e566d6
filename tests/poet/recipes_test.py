"""The published recipes, as transforms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import poet_1b
from configs import poet_60m
from configs import poet_130m
from configs import poet_350m
from jaxllm import poet
from jaxllm.poet import recipes

_LABELS = {'kernel': 'poet', 'embedding': 'decay', 'scale': 'plain'}


def _params():
  rng = np.random.default_rng(0)
  return {
    'kernel': jnp.asarray(rng.standard_normal((512, 256)), jnp.float32),
    'embedding': jnp.asarray(rng.standard_normal((10, 4)), jnp.float32),
    'scale': jnp.ones(4),
  }


def _first_step(tx, gradients):
  params = _params()
  state = tx.init(params)
  updates, state = jax.jit(tx.update)(gradients, state, params)
  return updates, state


@pytest.mark.parametrize(
  ('alias', 'size', 'block', 'poet_rate', 'rate'),
  [
    (poet.poet_bs, '60m', 64, 4e-3, 1e-2),
    (poet.poet_fs, '1.3b', 1 / 8, 4e-3, 1e-3),
    (poet.poet_x, '3b', 256, 2.5e-4, 1e-3),
  ],
)
@pytest.mark.parametrize('as_function', [False, True])
def test_first_step_has_the_published_rates(
  alias, size, block, poet_rate, rate, as_function
):
  labels = (
    (lambda params: {name: _LABELS[name] for name in params})
    if as_function
    else _LABELS
  )
  tx = alias(size, block, labels, warmup_steps=0)
  rng = np.random.default_rng(1)
  gradients = jax.tree.map(
    lambda p: 1e3 * jnp.asarray(rng.standard_normal(p.shape), jnp.float32),
    _params(),
  )
  updates, state = _first_step(tx, gradients)
  # Adam's first step moves every coordinate by its rate.
  for v in jax.tree.leaves(state.inner_states['poet'].inner_state.rotations):
    assert float(jnp.median(jnp.abs(v))) == pytest.approx(poet_rate, rel=0.05)
  np.testing.assert_allclose(np.abs(updates['scale']), rate, rtol=0.01)
  # Decay adds to the embedding's step, and to nothing else.
  decay = -rate * 0.01 * _params()['embedding']
  np.testing.assert_allclose(
    np.abs(updates['embedding'] - decay), rate, rtol=0.01
  )


def test_each_group_is_clipped_by_itself():
  """A thousandfold gradient of the kernel leaves the embedding's step alone."""
  tx = poet.poet_bs('60m', 64, _LABELS, epsilon=1.0)
  gradients = jax.tree.map(jnp.ones_like, _params())
  updates, _ = _first_step(tx, gradients)
  gradients['kernel'] = 1e3 * gradients['kernel']
  again, _ = _first_step(tx, gradients)
  chex.assert_trees_all_equal(updates['embedding'], again['embedding'])


@pytest.mark.parametrize(
  ('config', 'size'),
  [
    (poet_60m, '60m'),
    (poet_130m, '130m'),
    (poet_350m, '350m'),
    (poet_1b, '1.3b'),
  ],
)
def test_configs_agree_with_the_recipes(config, size):
  values = config.get_config()
  optimizer, recipe = values.optimizer, recipes.POET_BS[size, 256]
  assert recipe == recipes.Recipe(
    steps=values.train.steps,
    learning_rate=optimizer.adamw.learning_rate,
    poet_learning_rate=optimizer.poet.learning_rate,
    block_size=optimizer.poet.block_size,
    fraction=optimizer.poet.fraction or None,
    merge_every=optimizer.poet.merge_every,
    warmup_steps=optimizer.warmup_steps,
    final_fraction=optimizer.final_fraction,
    weight_decay=optimizer.adamw.weight_decay,
    clip_norm=optimizer.poet.clip_norm,
    clip_ramp_steps=optimizer.poet.clip_ramp_steps,
    beta1=optimizer.poet.beta1,
    beta2=optimizer.poet.beta2,
    epsilon=optimizer.poet.epsilon,
    neumann_terms=optimizer.poet.neumann_terms,
  )
  assert optimizer.adamw.clip_norm == optimizer.poet.clip_norm
  assert values.model.initializer == 'normalized'


def test_what_was_not_published_is_refused():
  with pytest.raises(ValueError, match='POET-X was not published for 3b 512'):
    poet.poet_x('3b', 512, _LABELS)
  with pytest.raises(ValueError, match="label 'matrix' is unknown"):
    poet.poet_bs('60m', 256, {'w': 'matrix'}).init({'w': jnp.ones((8, 8))})
  with pytest.raises(TypeError, match='setps'):
    poet.poet_bs('60m', 256, _LABELS, setps=3)
