"""Initializers of the decoder's matrices, by the name a config gives them."""

from flax.typing import Dtype
from flax.typing import Initializer
import jax
from jax import Array
import jax.numpy as jnp

NAMES = ('standard', 'normalized')


def matrix_initializer(name: str, scale: float) -> Initializer:
  """Returns the initializer of a decoder matrix.

  Args:
    name: 'standard' draws every element from N(0, scale^2). 'normalized' draws
      a Gaussian and divides each column by its norm, so that every output
      feature starts with weights of norm `scale`; POET starts so (Qiu et al.,
      `Reparameterized LLM Training via Orthogonal Equivalence Transformation
      <https://arxiv.org/abs/2506.08001>`_, 2025).
    scale: the standard deviation, or the norm of a column.

  Returns:
    A function of (key, shape `[..., D_in, D_out]`, dtype).

  Raises:
    ValueError: the name is unknown.
  """
  if name == 'standard':
    return jax.nn.initializers.normal(stddev=scale)
  if name == 'normalized':
    return _normalized(scale)
  raise ValueError(
    f'initializer={name!r} is unknown; use one of {", ".join(NAMES)}'
  )


def _normalized(scale: float) -> Initializer:
  def initialize(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array:
    gaussian = jax.random.normal(key, shape, jnp.float32)
    # A flax kernel is [D_in, D_out]: a column holds one output's weights.
    norm = jnp.linalg.norm(gaussian, axis=-2, keepdims=True)
    return (scale * gaussian / norm).astype(dtype)

  return initialize
