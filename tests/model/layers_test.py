"""Layers: rotary geometry, its scaling, masks, the norm and the cache."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.model import layers

_SCALING = layers.RopeScaling(
  factor=8.0,
  low_frequency_factor=1.0,
  high_frequency_factor=4.0,
  original_length=8192,
)


def test_frequencies_are_powers_of_theta():
  frequencies = layers.rope_frequencies(8, 10000.0, None)
  chex.assert_type(frequencies, np.float32)
  np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_scaling_follows_the_formula_of_llama_3():
  plain = layers.rope_frequencies(128, 500000.0, None).astype(np.float64)
  scaled = layers.rope_frequencies(128, 500000.0, _SCALING)
  cases = set()
  for frequency, actual in zip(plain, scaled, strict=True):
    # As the reference code writes it, in wavelengths.
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4.0:
      expected, case = frequency, 'kept'
    elif wavelength > 8192 / 1.0:
      expected, case = frequency / 8.0, 'stretched'
    else:
      smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
      expected = (1 - smooth) * frequency / 8.0 + smooth * frequency
      case = 'between'
    cases.add(case)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
  assert cases == {'kept', 'between', 'stretched'}


def _rotate(x, positions):
  frequencies = layers.rope_frequencies(x.shape[-1], 100.0, None)
  angles = positions[:, :, None] * frequencies[None, None]
  return layers.rotate(x, jnp.cos(angles), jnp.sin(angles))


def test_rotation_pairs_features_of_the_two_halves():
  quarter = jnp.array([[[math.pi / 2, 0.0]]])
  x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
  rotated = layers.rotate(x, jnp.cos(quarter), jnp.sin(quarter))
  np.testing.assert_allclose(rotated[0, 0, 0], [-3, 2, 1, 4], atol=1e-6)


def test_scores_depend_on_distance_alone_and_norms_not_at_all():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

  def score(q_position, k_position):
    rotated_q = _rotate(q, jnp.array([[q_position]], jnp.float32))
    rotated_k = _rotate(k, jnp.array([[k_position]], jnp.float32))
    return jnp.sum(rotated_q * rotated_k)

  np.testing.assert_allclose(score(5, 3), score(9, 7), rtol=1e-4)
  assert abs(score(5, 3) - score(5, 4)) > 1e-2
  rotated = _rotate(q, jnp.array([[11.0]]))
  np.testing.assert_allclose(
    jnp.linalg.norm(rotated), jnp.linalg.norm(q), rtol=1e-5
  )


def test_segment_mask_matches_its_example():
  mask = layers.segment_mask(jnp.array([[1, 1, 2, 0]]))
  chex.assert_trees_all_equal(
    mask.astype(jnp.int32),
    jnp.array([[[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]]),
  )


def test_slot_mask_matches_its_example():
  mask = layers.slot_mask(jnp.array([[1, 2]]), 4)
  chex.assert_trees_all_equal(
    mask.astype(jnp.int32), jnp.array([[[[1, 1, 0, 0], [1, 1, 1, 0]]]])
  )


def test_rms_norm_ignores_the_scale_of_its_input():
  norm = layers.RMSNorm(1e-12, jnp.bfloat16)
  x = jax.random.normal(jax.random.key(0), (2, 3, 16))
  variables = norm.init(jax.random.key(0), x)
  chex.assert_type(variables['params']['scale'], jnp.float32)
  y = norm.apply(variables, x)
  chex.assert_type(y, jnp.bfloat16)
  chex.assert_trees_all_equal(norm.apply(variables, 1024 * x), y)


def test_rms_norm_squares_in_float32():
  # 3.015625 is a bfloat16 number, but its square is not.
  x = jnp.full((1, 1, 4), 3.015625, jnp.bfloat16)
  norm = layers.RMSNorm(0.0, jnp.float32)
  y = norm.apply({'params': {'scale': jnp.ones(4)}}, x)
  np.testing.assert_allclose(y, np.ones((1, 1, 4)), rtol=1e-6)


def test_rms_norm_scales_each_feature():
  norm = layers.RMSNorm(0.0, jnp.float32)
  scale = jnp.arange(1.0, 5.0)
  y = norm.apply({'params': {'scale': scale}}, jnp.full((1, 2, 4), 7.0))
  np.testing.assert_allclose(y[0, 1], scale, rtol=1e-6)


@pytest.mark.parametrize('layer', [0, 1])
def test_cache_is_written_at_positions_of_one_layer(layer):
  empty = jnp.zeros((2, 2, 4, 1, 2))
  k = jnp.arange(1.0, 9.0).reshape(2, 2, 1, 2)
  positions = jnp.array([[0, 2], [3, 1]])
  cache = layers.write_cache(
    layers.KVCache(empty, empty), jnp.int32(layer), positions, k, -k
  )
  expected = np.zeros((2, 2, 4, 1, 2))
  for row, slots in enumerate(positions):
    for column, slot in enumerate(slots):
      expected[layer, row, slot] = k[row, column]
  chex.assert_trees_all_equal(np.asarray(cache.keys), expected)
  chex.assert_trees_all_equal(np.asarray(cache.values), -expected)
