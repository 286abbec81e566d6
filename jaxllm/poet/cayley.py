"""Orthogonal matrices from skew vectors: exact Cayley and Cayley-Neumann.

A rotation of size b is described by the b(b-1)/2 entries of its generator's
strict upper triangle, row by row. The generator is Q = U - U^T (no factor
1/2), and

  exact:      R = (I + Q)(I - Q)^-1
  truncated:  R = (I + Q)(I + Q + Q^2 + ... + Q^k),  k = `terms`.

With k = 3 the truncation is I + 2Q + 2Q^2 + 2Q^3 + Q^4. If Q has eigenvalues
+-i theta, R turns each plane by about 2 arctan(theta), and the truncation's
singular values are |1 - (i theta)^(k+1)|: at k = 3 a plane shrinks by
1 - theta^4, and the series diverges for theta >= 1.

Qiu et al., `Reparameterized LLM Training via Orthogonal Equivalence
Transformation <https://arxiv.org/abs/2506.08001>`_, 2025, sections 3 and 5.3.
"""

import math

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

_PRECISION = jax.lax.Precision.HIGHEST


def block_size(num_coordinates: int) -> int:
  """Returns b such that b(b-1)/2 = `num_coordinates`; 3 -> 3, 6 -> 4."""
  b = (1 + math.isqrt(1 + 8 * num_coordinates)) // 2
  if b * (b - 1) // 2 != num_coordinates:
    raise ValueError(
      f'{num_coordinates} is not b(b-1)/2 for any whole b: the last axis of a'
      ' skew vector holds the strict upper triangle of a b x b matrix'
    )
  return b


@jax.custom_vjp
def skew(v: Array) -> Array:
  """Skew-symmetric matrix of a vector: `[..., b(b-1)/2]` -> `[..., b, b]`.

  Example:
    skew([1, 2, 3]) = [[ 0,  1,  2],
                       [-1,  0,  3],
                       [-2, -3,  0]]
  """
  b = block_size(v.shape[-1])
  rows, columns = np.triu_indices(b, k=1)
  index = np.zeros((b, b), np.int32)
  index[rows, columns] = np.arange(len(rows))
  index[columns, rows] = np.arange(len(rows))
  sign = np.triu(np.ones((b, b)), k=1) - np.tril(np.ones((b, b)), k=-1)
  q_BB = jnp.take(v, index.reshape(-1), axis=-1) * jnp.broadcast_to(
    sign.reshape(-1).astype(v.dtype), (*v.shape[:-1], b * b)
  )
  return q_BB.reshape(*v.shape[:-1], b, b)


def _skew_forward(v: Array) -> tuple[Array, None]:
  return skew(v), None


def _skew_backward(_: None, gradient_BB: Array) -> tuple[Array]:
  # A gather; autodiff would transpose the gather above to a slow scatter.
  b = gradient_BB.shape[-1]
  rows, columns = np.triu_indices(b, k=1)
  flat = gradient_BB.reshape(*gradient_BB.shape[:-2], b * b)
  upper = jnp.take(flat, rows * b + columns, axis=-1)
  lower = jnp.take(flat, columns * b + rows, axis=-1)
  return (upper - lower,)


skew.defvjp(_skew_forward, _skew_backward)


def cayley_neumann(v: Array, terms: int = 3) -> Array:
  """Truncated Cayley transform (I + Q)(I + Q + ... + Q^terms), Q = skew(v).

  `terms` is the paper's k. At v = 0 the result is exactly the identity.

  Args:
    v: `[..., b(b-1)/2]`, strict upper triangle, row-major.
    terms: order of the Neumann series, at least 1.

  Returns:
    `[..., b, b]` in v's dtype; orthogonal up to |1 - (i theta)^(terms+1)|.
  """
  if terms < 1:
    raise ValueError(f'terms={terms}: the Neumann series needs 1 or more')
  q_BB = skew(v)
  eye_BB = _eye_like(q_BB)
  if terms == 3:
    return _third_order(q_BB)
  series_BB = eye_BB + q_BB  # Horner: I + Q(I + Q(...))
  for _ in range(terms - 1):
    series_BB = eye_BB + _matmul(q_BB, series_BB)
  return _matmul(eye_BB + q_BB, series_BB)


def cayley(v: Array) -> Array:
  """Exact Cayley transform (I + Q)(I - Q)^-1, Q = skew(v).

  Args:
    v: `[..., b(b-1)/2]`, strict upper triangle, row-major.

  Returns:
    `[..., b, b]` in v's dtype, orthogonal to rounding error.
  """
  q_BB = skew(v)
  eye_BB = _eye_like(q_BB)
  # (I + Q) and (I - Q)^-1 commute, so one left solve serves.
  return jnp.linalg.solve(eye_BB - q_BB, eye_BB + q_BB)


@jax.custom_vjp
def _third_order(q_BB: Array) -> Array:
  """I + 2Q + 2Q^2 + 2Q^3 + Q^4 of a skew Q, as (I + Q)^2 (I + Q^2)."""
  return _third_order_forward(q_BB)[0]


def _third_order_forward(q_BB: Array) -> tuple[Array, tuple[Array, Array]]:
  square_BB = _matmul(q_BB, q_BB)
  left_BB, right_BB = _factors(q_BB, square_BB)
  return _matmul(left_BB, right_BB), (q_BB, square_BB)


def _third_order_backward(
  saved: tuple[Array, Array], gradient_BB: Array
) -> tuple[Array]:
  # R = A B with A = I + 2Q + Q^2 and B = I + Q^2; Q^T = -Q makes B symmetric.
  # Four products, like the closed form of arXiv 2603.05500, section 3.4.
  q_BB, square_BB = saved
  left_BB, right_BB = _factors(q_BB, square_BB)
  to_left_BB = _matmul(gradient_BB, right_BB)
  to_right_BB = _matmul(jnp.swapaxes(left_BB, -1, -2), gradient_BB)
  to_square_BB = to_left_BB + to_right_BB
  return (
    2 * to_left_BB - _matmul(to_square_BB, q_BB) - _matmul(q_BB, to_square_BB),
  )


_third_order.defvjp(_third_order_forward, _third_order_backward)


def _factors(q_BB: Array, square_BB: Array) -> tuple[Array, Array]:
  right_BB = _eye_like(q_BB) + square_BB
  return right_BB + 2 * q_BB, right_BB


def _eye_like(q_BB: Array) -> Array:
  eye_BB = jnp.eye(q_BB.shape[-1], dtype=q_BB.dtype)
  return jnp.broadcast_to(
    eye_BB.reshape((1,) * (q_BB.ndim - 2) + eye_BB.shape), q_BB.shape
  )


def _matmul(a_BB: Array, b_BB: Array) -> Array:
  return jnp.matmul(a_BB, b_BB, precision=_PRECISION)
