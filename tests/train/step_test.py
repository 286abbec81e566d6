"""Laws of the training step, for every optimizer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import batch as batch_lib
from jaxllm import poet
from jaxllm import settings
from jaxllm.model import decoder
from jaxllm.train import objectives
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib

_MODEL = decoder.DecoderConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  rope_theta=1e4,
  rope_scaling=None,
  norm_epsilon=1e-6,
  attention_bias=True,
  mlp_bias=False,
  tie_embeddings=False,
  initializer='normalized',
  init_scale=1.0,
  embedding_stddev=0.02,
  compute_dtype='float32',
  remat='none',
  attention='xla',
)
_OPTIMIZER = {
  'name': 'adamw',
  'warmup_steps': 0,
  'final_fraction': 0.1,
  'adamw': {
    'learning_rate': 1e-2,
    'beta1': 0.9,
    'beta2': 0.95,
    'epsilon': 1e-8,
    'weight_decay': 0.1,
    'clip_norm': 1.0,
  },
  'muon': {'learning_rate': 1e-2, 'beta': 0.95, 'weight_decay': 0.1},
  'poet': {
    'inner': 'adam',
    'learning_rate': 2e-2,
    'beta1': 0.9,
    'beta2': 0.999,
    'epsilon': 1e-6,
    'alternate_sides': False,
    'clip_norm': 1.0,
    'clip_ramp_steps': 2,
    'block_size': 8,
    'fraction': 0.0,
    'neumann_terms': 3,
    'merge_every': 3,
    'resample_every': 1,
    'reset_inner': True,
    'partitions': 1,
    'seed': 0,
  },
}
# POET with every setting that the first lacks.
_TURNING = {
  **_OPTIMIZER['poet'],
  'inner': 'orthogonalized',
  'learning_rate': 0.05,
  'alternate_sides': True,
  'clip_ramp_steps': 0,
  'block_size': 0,
  'fraction': 0.5,
  'merge_every': 1,
  'resample_every': 4,
}
_CASES = {
  **{name: {'name': name} for name in optimizers.NAMES},
  'poet, orthogonalized': {'name': 'poet', 'poet': _TURNING},
}


def _config(**changes) -> optimizers.OptimizerConfig:
  return settings.build(
    optimizers.OptimizerConfig, {**_OPTIMIZER, **changes}, 'optimizer'
  )


def _optimizer(case: str, steps: int = 20) -> optimizers.Optimizer:
  return optimizers.build(_config(**_CASES[case]), steps)


def _batch(rows: int = 4) -> batch_lib.Batch:
  """Rows with different numbers of counted targets."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 32, (rows, 9), dtype=np.int32)
  segment_ids = np.ones((rows, 9), np.int32)
  for i in range(rows):
    segment_ids[i, 9 - 2 * i :] = 0
  return batch_lib.shift(tokens, segment_ids)


def _loss(params, batch, key):
  del key
  return objectives.next_token_loss(
    decoder.Decoder(_MODEL), params, batch, chunk_tokens=64
  )


@functools.cache
def _params():
  row = jnp.zeros((1, 4), jnp.int32)
  model = decoder.Decoder(_MODEL)
  return jax.jit(model.init)(jax.random.key(0), row, row, row)['params']


@functools.cache
def _jitted(name: str):
  """Initial state and step of an optimizer, each compiled once."""
  optimizer = _optimizer(name)
  step = functools.partial(
    step_lib.train_step,
    loss_function=_loss,
    optimizer=optimizer,
    microbatches=1,
  )
  initial = functools.partial(step_lib.init_state, optimizer=optimizer, seed=0)
  return jax.jit(initial), jax.jit(step, donate_argnums=0)


def _train(name: str, steps: int):
  """The state after so many steps on one batch, and all steps' metrics."""
  initial, step = _jitted(name)
  state, metrics = initial(_params()), []
  for _ in range(steps):
    state, last = step(state, _batch())
    metrics.append({k: float(v) for k, v in last.items()})
  return state, metrics


@pytest.mark.parametrize('microbatches', [2, 4])
def test_microbatches_give_the_gradient_of_one_batch(microbatches):
  key = jax.random.key(0)
  batch = _batch()
  one, many = (
    jax.jit(
      lambda params, n=n: step_lib.loss_and_gradients(
        params, batch, key, _loss, n
      )
    )(_params())
    for n in (1, microbatches)
  )
  chex.assert_trees_all_close(many, one, rtol=1e-5, atol=1e-6)
  counts = [float(jnp.sum(row)) for row in batch.weights]
  assert len(set(counts)) > 1  # a mean of means would differ


@pytest.mark.parametrize('name', _CASES)
def test_steps_donate_never_recompile_and_lower_the_loss(name):
  state, metrics = _train(name, 8)
  assert _jitted(name)[1]._cache_size() == 1
  assert metrics[-1]['loss'] < metrics[0]['loss'] - 0.1
  assert int(state.step) == 8
  chex.assert_tree_all_finite(state.params)


def test_poet_params_are_the_weights_its_state_describes():
  state, metrics = _train('poet', 4)  # past a merge
  groups = optimizers.parameter_groups(state.params)
  poet_state = state.opt_state.inner_states['poet'].inner_state
  noise = jax.tree.map(
    lambda group, p: p + 1 if group == 'matrix' else optax.MaskedNode(),
    groups,
    state.params,
  )
  rebuilt = jax.jit(poet.effective_weights)(poet_state, noise)
  expected = jax.tree.map(
    lambda group, p: p if group == 'matrix' else optax.MaskedNode(),
    groups,
    state.params,
  )
  chex.assert_trees_all_equal(rebuilt, expected)
  assert 0 < metrics[-1]['poet/largest_angle'] < 0.5
  assert metrics[-1]['poet/norm_drift'] < 1e-5


def test_poet_keeps_singular_values_and_trains_the_rest():
  state, metrics = _train('poet', 4)  # merges after 3
  angles = [m['poet/largest_angle'] for m in metrics]
  # Two generations of rotations, two sides each; an estimate from below.
  shrinkage = 4 * (1.2 * max(angles)) ** 4
  assert shrinkage < 0.05
  before, after = (
    jnp.linalg.svd(p['layers']['mlp']['up_proj']['kernel'], compute_uv=False)
    for p in (_params(), state.params)
  )
  chex.assert_trees_all_close(after, before, rtol=shrinkage + 1e-5)
  for path in (('embed', 'embedding'), ('final_norm', 'scale')):
    old, new = _params(), state.params
    for part in path:
      old, new = old[part], new[part]
    assert float(jnp.abs(old - new).max()) > 1e-3


def test_every_parameter_has_a_group_and_vectors_do_not_decay():
  groups = optimizers.parameter_groups(_params())
  assert groups['layers']['attention']['q_proj'] == {
    'kernel': 'matrix',
    'bias': 'vector',
  }
  assert groups['embed']['embedding'] == 'embedding'
  assert groups['layers']['input_norm']['scale'] == 'vector'
  transform = _optimizer('adamw').transform
  zeros = jax.tree.map(jnp.zeros_like, _params())
  ones = jax.tree.map(jnp.ones_like, _params())
  updates, _ = jax.jit(transform.update)(zeros, transform.init(ones), ones)
  decayed = jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates)
  expected = jax.tree.map(lambda group: group != 'vector', groups)
  assert decayed == expected


def test_an_unknown_parameter_is_an_error():
  with pytest.raises(ValueError, match='layers/adapter/kernel'):
    optimizers.parameter_groups({'layers': {'adapter': {'kernel': 0}}})


def test_muon_does_not_mix_stacked_layers():
  transform = _optimizer('muon').transform
  gradients = jax.tree.map(jnp.zeros_like, _params())
  kernel = gradients['layers']['mlp']['up_proj']['kernel']
  gradients['layers']['mlp']['up_proj']['kernel'] = kernel.at[0].set(
    jax.random.normal(jax.random.key(0), kernel.shape[1:])
  )
  ones = jax.tree.map(jnp.zeros_like, _params())  # no weight decay
  updates, _ = jax.jit(transform.update)(gradients, transform.init(ones), ones)
  update = updates['layers']['mlp']['up_proj']['kernel']
  assert (
    float(jnp.abs(update[1]).max()) < 1e-6 < float(jnp.abs(update[0]).max())
  )


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'name': 'sgd'}, 'choose one of adamw, muon, poet'),
    ({'warmup': 3}, 'unknown setting warmup'),
    (
      {'poet': {**_OPTIMIZER['poet'], 'block': 3}},
      'optimizer.poet: unknown setting block',
    ),
    ({'muon': {'beta': 0.9}}, 'missing setting learning_rate'),
    ({'warmup_steps': -5}, 'warmup_steps=-5: give 0 or more'),
    ({'final_fraction': -1}, r'final_fraction=-1 is not in \[0, 1\]'),
    (
      {'adamw': {**_OPTIMIZER['adamw'], 'clip_norm': -1}},
      'optimizer.adamw.clip_norm=-1: give a number above 0',
    ),
    (
      {'poet': {**_OPTIMIZER['poet'], 'beta1': 1.5}},
      r'optimizer.poet.beta1=1.5: give a number in \[0, 1\)',
    ),
    (
      {'poet': {**_OPTIMIZER['poet'], 'inner': 'sgd'}},
      "optimizer.poet.inner='sgd': choose one of adam, orthogonalized",
    ),
    (
      {'poet': {**_OPTIMIZER['poet'], 'clip_ramp_steps': 3}},
      r'clip_ramp_steps=3.*\(merge_every=3\)',
    ),
  ],
)
def test_bad_optimizer_settings_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    _config(**change)


def test_a_warmup_longer_than_the_run_is_refused():
  config = _config(warmup_steps=20)
  with pytest.raises(ValueError, match=r'warmup_steps=20.*train.steps=20'):
    optimizers.build(config, 20)
