"""The decoder: causality, packing, caching, precision and its parameters."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import settings
from jaxllm.model import decoder
from jaxllm.model import layers

_VALUES = {
  'vocab_size': 64,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 8,
  'rope_theta': 10000.0,
  'rope_scaling': None,
  'norm_epsilon': 1e-6,
  'attention_bias': False,
  'mlp_bias': False,
  'tie_embeddings': False,
  'initializer': 'standard',
  'init_scale': 0.3,
  'embedding_stddev': 1.0,
  'compute_dtype': 'float32',
  'remat': 'none',
  'attention': 'xla',
}
_CONFIG = settings.build(decoder.DecoderConfig, _VALUES, 'model')
_LENGTH = 8


# Compiling takes longer than these tiny models run.
_jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


def _init(config):
  tokens = jnp.zeros((1, _LENGTH), jnp.int32)
  return decoder.Decoder(config).init(jax.random.key(0), *[tokens] * 3)


@functools.cache
def _params(config):
  return _jit(_init, static_argnums=0)(config)['params']


def _forward(config, params, tokens, positions, segment_ids, cache=None):
  return decoder.Decoder(config).apply(
    {'params': params}, tokens, positions, segment_ids, cache
  )


_apply = _jit(_forward, static_argnums=0)


def _logits(config, params, *row):
  return _apply(config, params, *row)[0]


def _row(*segments):
  """Packs segments into a row of 8: (tokens, positions, segment_ids)."""
  lengths = [len(segment) for segment in segments]
  padding = (0, _LENGTH - sum(lengths))
  columns = (
    np.concatenate(segments),
    np.concatenate([np.arange(length) for length in lengths]),
    np.repeat(np.arange(len(segments)) + 1, lengths),
  )
  return tuple(jnp.array([np.pad(column, padding)]) for column in columns)


def _tokens(length, seed=0):
  return np.random.RandomState(seed).randint(1, 64, size=length)


@_jit
def _sensitivity(params, row, query):
  """The norm of d logits[query] / d embedding of each token, `[L]`."""
  tokens, positions, segment_ids = row

  def project(embedded):
    # Distinct ids make every token's embedding a parameter of its own.
    own = jnp.arange(_LENGTH)[None]
    table = params['embed']['embedding'].at[:_LENGTH].set(embedded)
    changed = {**params, 'embed': {'embedding': table}}
    logits, _ = _forward(_CONFIG, changed, own, positions, segment_ids)
    return logits[0, query] @ jnp.cos(jnp.arange(64))

  embedded = params['embed']['embedding'][tokens[0]]
  return jnp.linalg.norm(jax.grad(project)(embedded), axis=-1)


@pytest.mark.parametrize('query', range(_LENGTH))
def test_causality(query):
  norms = _sensitivity(_params(_CONFIG), _row(_tokens(_LENGTH)), query)
  np.testing.assert_array_equal(norms[query + 1 :], np.zeros(7 - query))
  assert (norms[: query + 1] > 1e-4).all()


@pytest.mark.parametrize(
  ('query', 'start'), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)]
)
def test_packed_segments_do_not_see_each_other(query, start):
  # Segments at [0, 1] and [2, 3, 4], padding at [5, 6, 7].
  row = _row(_tokens(2), _tokens(3))
  norms = _sensitivity(_params(_CONFIG), row, query)
  seen = np.zeros(_LENGTH, bool)
  seen[start : query + 1] = True
  np.testing.assert_array_equal(np.asarray(norms) > 0, seen)


def test_packed_row_equals_separate_rows():
  first, second = _tokens(3, 1), _tokens(4, 2)
  params = _params(_CONFIG)
  packed = _logits(_CONFIG, params, *_row(first, second))
  alone_1 = _logits(_CONFIG, params, *_row(first))
  alone_2 = _logits(_CONFIG, params, *_row(second))
  np.testing.assert_allclose(packed[:, :3], alone_1[:, :3], atol=1e-5)
  np.testing.assert_allclose(packed[:, 3:7], alone_2[:, :4], atol=1e-5)


def test_positions_matter_only_by_their_differences():
  tokens, positions, segment_ids = _row(_tokens(_LENGTH))
  params = _params(_CONFIG)
  logits = _logits(_CONFIG, params, tokens, positions, segment_ids)
  later = _logits(_CONFIG, params, tokens, positions + 37, segment_ids)
  spread = _logits(_CONFIG, params, tokens, positions * 3, segment_ids)
  np.testing.assert_allclose(later, logits, atol=1e-4)
  assert jnp.abs(spread - logits).max() > 1e-2


def _gradients(config, params, row):
  def loss(params):
    logits, _ = _forward(config, params, *row)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, :, 5])

  return jax.grad(loss)(params)


_jit_gradients = _jit(_gradients, static_argnums=0)


def test_a_row_of_padding_alone_is_finite():
  params = _params(_CONFIG)
  row = (jnp.zeros((1, _LENGTH), jnp.int32),) * 3
  chex.assert_tree_all_finite(_logits(_CONFIG, params, *row))
  chex.assert_tree_all_finite(_jit_gradients(_CONFIG, params, row))


def test_grouped_heads_equal_repeated_heads():
  full = dataclasses.replace(_CONFIG, num_kv_heads=4)
  params = _params(_CONFIG)

  def repeat(path, leaf):
    if not {'k_proj', 'v_proj'} & {key.key for key in path}:
      return leaf
    heads = leaf.reshape(*leaf.shape[:-1], 2, 8)
    return jnp.repeat(heads, 2, axis=-2).reshape(*leaf.shape[:-1], 32)

  repeated = jax.tree_util.tree_map_with_path(repeat, params)
  row = _row(_tokens(_LENGTH))
  grouped = _logits(_CONFIG, params, *row)
  logits = _logits(full, repeated, *row)
  np.testing.assert_allclose(grouped, logits, atol=1e-5)


@pytest.mark.parametrize(
  ('tied', 'compute_dtype'), [(False, 'bfloat16'), (True, 'float32')]
)
def test_hidden_and_unembedding_make_the_logits(tied, compute_dtype):
  config = dataclasses.replace(
    _CONFIG, tie_embeddings=tied, compute_dtype=compute_dtype
  )
  params = dict(_params(_CONFIG))
  if tied:
    del params['lm_head']
  init = jax.eval_shape(functools.partial(_init, config))['params']
  chex.assert_trees_all_equal_shapes_and_dtypes(init, params)
  row = _row(_tokens(_LENGTH))
  apply = functools.partial(decoder.Decoder(config).apply, method='hidden')
  hidden, cache = _jit(apply)({'params': params}, *row)
  assert cache is None
  chex.assert_shape(hidden, (1, _LENGTH, 16))
  chex.assert_type(hidden, jnp.dtype(compute_dtype))
  matrix = decoder.unembedding(params, config)
  chex.assert_shape(matrix, (16, 64))
  logits = _logits(config, params, *row)
  chex.assert_type(logits, jnp.float32)
  np.testing.assert_allclose(
    decoder.unembed(hidden, matrix), logits, rtol=1e-5, atol=1e-5
  )
  # Added up in float32: the logits are not all bfloat16 numbers.
  assert (logits.astype(jnp.bfloat16) != logits).mean() > 0.5


@pytest.mark.parametrize('remat', ['full', 'dots'])
def test_remat_does_not_change_gradients(remat):
  params = _params(_CONFIG)
  row = _row(_tokens(3, 1), _tokens(5, 2))
  config = dataclasses.replace(_CONFIG, remat=remat)
  chex.assert_trees_all_close(
    _jit_gradients(config, params, row),
    _jit_gradients(_CONFIG, params, row),
    rtol=1e-5,
    atol=1e-7,
  )


@pytest.mark.parametrize(
  ('remat', 'num_products'), [('none', 30), ('full', 38), ('dots', 32)]
)
def test_remat_recomputes_what_it_says(remat, num_products):
  # A layer has 7 matrices and 2 products of attention, 9 forward and 18
  # backward, and the head adds 3. 'full' repeats the 9 but for the last, whose
  # result nobody needs; 'dots' repeats attention's two.
  config = dataclasses.replace(_CONFIG, remat=remat)
  jaxpr = jax.make_jaxpr(_gradients, static_argnums=0)(
    config, _params(_CONFIG), _row(_tokens(_LENGTH))
  )
  assert str(jaxpr).count('dot_general') == num_products


def test_bfloat16_computes_near_float32_and_keeps_float32_params():
  config = dataclasses.replace(_CONFIG, compute_dtype='bfloat16')
  params = _params(config)
  chex.assert_trees_all_equal(params, _params(_CONFIG))
  row = _row(_tokens(_LENGTH))
  gradients = jax.eval_shape(functools.partial(_gradients, config), params, row)
  for tree in (params, gradients):
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.float32.dtype}
  exact = _logits(_CONFIG, params, *row)
  logits = _logits(config, params, *row)
  error = jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact)
  # bfloat16 keeps 8 bits: a relative error of 0.4 % per rounding.
  assert 1e-4 < error < 0.05


def test_embedding_gradients_add_up_in_float32():
  # In bfloat16 a sum stops growing at 256 times its summand.
  config = dataclasses.replace(_CONFIG, compute_dtype='bfloat16')
  jaxpr = jax.make_jaxpr(_gradients, static_argnums=0)(
    config, _params(_CONFIG), _row(_tokens(_LENGTH))
  )
  sums = re.findall(r':(\w+)\[64,16\] = scatter-add', str(jaxpr))
  assert sums == ['f32']


def test_cache_holds_the_compute_dtype():
  config = dataclasses.replace(_CONFIG, compute_dtype='bfloat16')
  cache = decoder.init_cache(config, 3, 5)
  chex.assert_shape([cache.keys, cache.values], (2, 3, 5, 2, 8))
  chex.assert_type([cache.keys, cache.values], jnp.bfloat16)


def test_cached_steps_equal_a_fresh_forward():
  params = _params(_CONFIG)
  tokens = jnp.array(_tokens((2, _LENGTH)))
  lengths = jnp.array([4, 2])
  positions = jnp.broadcast_to(jnp.arange(_LENGTH)[None], tokens.shape)
  ones = jnp.ones_like(tokens)
  fresh, _ = _apply(_CONFIG, params, tokens, positions, ones)

  # The second row's prompt is padded with tokens that are not its next.
  prompts = jnp.where(positions < lengths[:, None], tokens, 63)[:, :4]
  cache = decoder.init_cache(_CONFIG, 2, _LENGTH)
  logits, cache = _apply(
    _CONFIG, params, prompts, positions[:, :4], ones[:, :4], cache
  )
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(
      jax.nn.log_softmax(logits[row, :length]),
      jax.nn.log_softmax(fresh[row, :length]),
      atol=1e-4,
    )
  for step in range(4):
    at = (lengths + step)[:, None]
    token = jnp.take_along_axis(tokens, at, axis=1)
    logits, cache = _apply(_CONFIG, params, token, at, ones[:, :1], cache)
    expected = jnp.take_along_axis(fresh, at[:, :, None], axis=1)
    np.testing.assert_allclose(
      jax.nn.log_softmax(logits), jax.nn.log_softmax(expected), atol=1e-4
    )


def test_parameter_tree_and_counts():
  config = dataclasses.replace(_CONFIG, attention_bias=True, mlp_bias=True)
  params = jax.eval_shape(functools.partial(_init, config))['params']
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  shapes = {'/'.join(k.key for k in path): leaf.shape for path, leaf in leaves}
  sizes = {'q': (16, 32), 'k': (16, 16), 'v': (16, 16), 'o': (32, 16)}
  sizes |= {'gate': (16, 24), 'up': (16, 24), 'down': (24, 16)}
  expected = {
    'embed/embedding': (64, 16),
    'layers/input_norm/scale': (2, 16),
    'layers/post_attention_norm/scale': (2, 16),
    'final_norm/scale': (16,),
    'lm_head/kernel': (16, 64),
  }
  for name, (inputs, outputs) in sizes.items():
    block = 'attention' if name in 'qkvo' else 'mlp'
    path = f'layers/{block}/{name}_proj'
    expected[f'{path}/kernel'] = (2, inputs, outputs)
    expected[f'{path}/bias'] = (2, outputs)
  assert shapes == expected

  matrices = 2 * sum(a * b for a, b in sizes.values())
  biases = 2 * sum(b for _, b in sizes.values())
  assert decoder.count_parameters(params) == (
    2 * 64 * 16 + matrices + biases + 5 * 16
  )
  # The head multiplies, tied or not; the look-up and the biases do not count.
  for tied in (False, True):
    config = dataclasses.replace(_CONFIG, tie_embeddings=tied)
    flops = decoder.flops_per_token(config, 100)
    assert flops == 6 * (matrices + 64 * 16) + 12 * 2 * 4 * 8 * 100


def test_every_layer_draws_its_own_weights():
  config = dataclasses.replace(
    _CONFIG, initializer='normalized', init_scale=1.0
  )
  params = _params(config)
  for block in ('attention', 'mlp'):
    for name, leaf in params['layers'][block].items():
      kernel = np.asarray(leaf['kernel'])
      norms = np.linalg.norm(kernel, axis=-2)
      np.testing.assert_allclose(norms, np.ones_like(norms), rtol=1e-5)
      assert np.abs(kernel[0] - kernel[1]).mean() > 0.05, name
  for table in (params['embed']['embedding'], params['lm_head']['kernel']):
    assert 0.8 < np.std(table) < 1.2


def test_a_token_outside_the_vocabulary_is_loud():
  row = _row(np.array([1, 64]))
  logits = _logits(_CONFIG, _params(_CONFIG), *row)
  assert np.isnan(logits[0, 1]).all()


def _config(**changes):
  return settings.build(decoder.DecoderConfig, {**_VALUES, **changes}, 'model')


def test_config_reads_the_scaling():
  scaling = {
    'factor': 8,
    'low_frequency_factor': 1.0,
    'high_frequency_factor': 4.0,
    'original_length': 8192,
  }
  config = _config(rope_scaling=scaling)
  assert config.rope_scaling == layers.RopeScaling(**scaling)
  del scaling['factor']
  with pytest.raises(ValueError, match='rope_scaling: missing setting factor'):
    _config(rope_scaling=scaling)


@pytest.mark.parametrize(
  ('change', 'complaint'),
  [
    ({'num_kv_heads': 3}, 'num_heads=4 is not divisible by num_kv_heads=3'),
    ({'head_dim': 7}, 'head_dim=7 is odd'),
    ({'num_layers': 0}, 'num_layers=0 must be positive'),
    ({'init_scale': float('inf')}, 'init_scale=inf must be positive'),
    ({'norm_epsilon': float('nan')}, 'norm_epsilon=nan must be positive'),
    ({'hidden_size': 16.0}, 'hidden_size=16.0 must be of type int'),
    ({'num_layers': True}, 'num_layers=True must be of type int'),
    ({'mlp_bias': 1}, 'mlp_bias=1 must be of type bool'),
    ({'remat': 'all'}, "remat='all' is unknown; use one of none, full, dots"),
    ({'initializer': 'he'}, "initializer='he' is unknown"),
    ({'compute_dtype': 'float16'}, "compute_dtype='float16' is unknown"),
    ({'attention': 'cudnn'}, 'attention=cudnn needs compute_dtype=bfloat16'),
    ({'rope_scaling': 8.0}, 'rope_scaling=8.0 must be a group'),
    (
      {'rope_scaling': layers.RopeScaling(8.0, 4.0, 1.0, 64)},
      'needs 0 < low_frequency_factor < high_frequency_factor',
    ),
  ],
)
def test_config_refuses(change, complaint):
  with pytest.raises(ValueError, match=f'^model.*{complaint}'):
    _config(**change)
