"""Cayley transforms against their dense definitions in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.poet import cayley
from jaxllm.poet import cayley_neumann
from jaxllm.poet import spectrum
from jaxllm.poet.cayley import block_size
from jaxllm.poet.cayley import skew

# The package exports the function `cayley` over its module's name.


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def _vector(b: int, scale: float, stack=(2, 3)) -> jax.Array:
  rng = np.random.default_rng(b)
  return jnp.asarray(rng.standard_normal((*stack, b * (b - 1) // 2)) * scale)


def test_skew_fills_the_upper_triangle_row_by_row():
  expected = jnp.array([[0.0, 1, 2], [-1, 0, 3], [-2, -3, 0]])
  chex.assert_trees_all_equal(skew(jnp.array([1.0, 2, 3])), expected)


def test_skew_gradient_is_upper_minus_lower():
  weight = jnp.arange(9.0).reshape(3, 3)
  gradient = jax.grad(lambda v: jnp.sum(skew(v) * weight))(jnp.ones(3))
  chex.assert_trees_all_equal(gradient, jnp.array([1 - 3.0, 2 - 6, 5 - 7]))


def test_a_length_that_is_no_triangle_is_refused():
  assert block_size(6) == 4
  with pytest.raises(ValueError, match='5 is not b'):
    skew(jnp.zeros(5))


@pytest.mark.parametrize('terms', [1, 2, 3, 4, 5])
def test_cayley_neumann_is_the_truncated_series(terms):
  v = _vector(6, 0.2)
  q = skew(v)
  series = sum(jnp.linalg.matrix_power(q, i) for i in range(1, terms + 1))
  eye = jnp.broadcast_to(jnp.eye(6), q.shape)
  expected = (eye + q) @ (eye + series)
  chex.assert_trees_all_close(cayley_neumann(v, terms), expected, atol=1e-14)


def test_cayley_is_orthogonal_and_matches_its_definition():
  v = _vector(6, 2.0)
  q = skew(v)
  eye = jnp.broadcast_to(jnp.eye(6), q.shape)
  expected = (eye + q) @ jnp.linalg.inv(eye - q)
  chex.assert_trees_all_close(cayley(v), expected, atol=1e-12)
  assert spectrum.orthogonality_error(cayley(v)) < 1e-12


@pytest.mark.parametrize('terms', [1, 2, 3, 4, 5])
@pytest.mark.parametrize('b', [5, 8])
def test_singular_values_follow_the_closed_form(terms, b):
  v = _vector(b, 0.15, stack=())
  theta = spectrum.angles(v)
  chex.assert_shape(theta, (b // 2,))
  planes = jnp.repeat(spectrum.neumann_singular_values(theta, terms), 2)
  expected = jnp.sort(jnp.concatenate([planes, jnp.ones(b % 2)]))
  found = jnp.sort(spectrum.singular_values(cayley_neumann(v, terms)))
  chex.assert_trees_all_close(found, expected, atol=1e-12)


@pytest.mark.parametrize('terms', [2, 3])
def test_gradients_agree_with_finite_differences(terms):
  v = _vector(5, 0.3, stack=())
  weight = jnp.asarray(np.random.default_rng(1).standard_normal((5, 5)))

  def loss(v):
    return jnp.sum(cayley_neumann(v, terms) * weight)

  step = 1e-6
  numeric = jnp.stack(
    [(loss(v + step * e) - loss(v - step * e)) / (2 * step) for e in np.eye(10)]
  )
  chex.assert_trees_all_close(jax.grad(loss)(v), numeric, atol=1e-8)


def test_gradient_at_zero_is_twice_the_skew_part():
  weight = jnp.asarray(np.random.default_rng(1).standard_normal((4, 4)))
  rows, columns = np.triu_indices(4, k=1)
  gradient = jax.grad(lambda v: jnp.sum(cayley_neumann(v) * weight))(
    jnp.zeros(6)
  )
  expected = 2 * (weight - weight.T)[rows, columns]
  chex.assert_trees_all_close(gradient, expected, atol=1e-14)


def test_zero_gives_exactly_the_identity():
  zeros = jnp.zeros((2, 6), jnp.float32)
  eye = jnp.broadcast_to(jnp.eye(4, dtype=jnp.float32), (2, 4, 4))
  chex.assert_trees_all_equal(cayley_neumann(zeros), eye)


def test_largest_angle_estimates_from_below():
  v = _vector(16, 0.05)
  exact = jnp.max(spectrum.angles(v))
  estimate = spectrum.largest_angle(v)
  assert 0.9 * exact < estimate <= exact * (1 + 1e-12)
