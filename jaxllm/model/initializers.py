"""Initializers of the decoder's matrices, by the name a config gives them.

POET keeps a matrix's singular values for ever, so what it starts with matters
more than under other optimizers. Qiu et al., `Reparameterized LLM Training via
Orthogonal Equivalence Transformation <https://arxiv.org/abs/2506.08001>`_,
2025, sections 3.1 and 5.3.
"""

import math

from flax.typing import Dtype
from flax.typing import Initializer
import jax
from jax import Array
import jax.numpy as jnp

NAMES = ('standard', 'xavier', 'normalized', 'uniform_spectrum')


def matrix_initializer(name: str, scale: float) -> Initializer:
  """Returns the initializer of a decoder matrix.

  Args:
    name: 'standard' draws every element from N(0, scale^2). 'xavier' does so
      with variance scale^2 * 2 / (D_in + D_out). 'normalized' draws a Gaussian
      and divides each column by its norm, so that every output feature starts
      with weights of norm `scale`. 'uniform_spectrum' is a Gaussian whose
      singular values are all replaced by `scale`.
    scale: the standard deviation, the factor to Xavier's, the norm of a column,
      or the singular value.

  Returns:
    A function of (key, shape `[..., D_in, D_out]`, dtype).

  Raises:
    ValueError: the name is unknown.
  """
  if name == 'standard':
    return jax.nn.initializers.normal(stddev=scale)
  if name == 'xavier':
    return _xavier(scale)
  if name == 'normalized':
    return _normalized(scale)
  if name == 'uniform_spectrum':
    return _uniform_spectrum(scale)
  raise ValueError(
    f'initializer={name!r} is unknown; use one of {", ".join(NAMES)}'
  )


def _xavier(scale: float) -> Initializer:
  def initialize(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
    # Not jax's own: it would count the layers of a stack as inputs.
    stddev = scale * math.sqrt(2 / (shape[-2] + shape[-1]))
    return stddev * jax.random.normal(key, shape, dtype)

  return initialize


def _normalized(scale: float) -> Initializer:
  def initialize(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
    gaussian = jax.random.normal(key, shape, jnp.float32)
    # A flax kernel is [D_in, D_out]: a column holds one output's weights.
    norm = jnp.linalg.norm(gaussian, axis=-2, keepdims=True)
    return (scale * gaussian / norm).astype(dtype)

  return initialize


def _uniform_spectrum(scale: float) -> Initializer:
  def initialize(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
    u, _, v = jnp.linalg.svd(
      jax.random.normal(key, shape, jnp.float32), full_matrices=False
    )
    return (scale * jnp.matmul(u, v, precision='highest')).astype(dtype)

  return initialize
