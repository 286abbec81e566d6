"""Initializers: norms, deviations, and the names they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.model import initializers


def test_normalized_columns_have_the_norm_asked_for():
  initialize = initializers.matrix_initializer('normalized', 0.5)
  kernel = initialize(jax.random.key(0), (3, 24, 16), jnp.float32)
  norms = np.linalg.norm(kernel, axis=-2)  # over the inputs
  np.testing.assert_allclose(norms, np.full((3, 16), 0.5), rtol=1e-6)
  # The rows are left as they fall.
  assert np.std(np.linalg.norm(kernel, axis=-1)) > 0.01


def test_standard_has_the_deviation_asked_for():
  initialize = initializers.matrix_initializer('standard', 0.02)
  kernel = np.asarray(initialize(jax.random.key(0), (256, 128), jnp.float32))
  # Three standard errors of 32,768 draws.
  assert abs(kernel.std() / 0.02 - 1) < 3 / np.sqrt(2 * kernel.size)
  assert abs(kernel.mean() / 0.02) < 3 / np.sqrt(kernel.size)
  # Gaussian, not truncated: 6.3e-5 of the draws lie beyond 4 deviations.
  assert np.abs(kernel).max() > 0.02 * 3.5


def test_xavier_variance_is_that_of_one_matrix_of_the_stack():
  initialize = initializers.matrix_initializer('xavier', 2.0)
  kernel = np.asarray(initialize(jax.random.key(0), (4, 96, 32), jnp.float32))
  expected = 2.0 * np.sqrt(2 / (96 + 32))
  assert abs(kernel.std() / expected - 1) < 3 / np.sqrt(2 * kernel.size)


@pytest.mark.parametrize('shape', [(3, 24, 16), (16, 24)])
def test_uniform_spectrum_has_one_singular_value(shape):
  initialize = initializers.matrix_initializer('uniform_spectrum', 0.5)
  kernel = np.asarray(initialize(jax.random.key(0), shape, jnp.float32))
  values = np.linalg.svd(kernel, compute_uv=False)
  np.testing.assert_allclose(values, np.full_like(values, 0.5), rtol=1e-5)


def test_unknown_name_is_refused():
  with pytest.raises(ValueError, match=r"initializer='he'.*standard"):
    initializers.matrix_initializer('he', 1.0)
