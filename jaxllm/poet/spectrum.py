"""What POET keeps and how far it drifts: angles, singular values, norms.

`largest_angle`, `orthogonality_error` and Frobenius norms are cheap enough for
every step, and `poet` returns them as readings. Singular values, the entropy of
their squares and the energy of the neurons take an SVD or all pairs of neurons:
look at them when a run is evaluated.
"""

import math

import jax
from jax import Array
import jax.numpy as jnp

from jaxllm.poet.cayley import skew

_POWER_ITERATIONS = 16


def singular_values(matrix: Array) -> Array:
  """Singular values, largest first: `[..., m, n]` -> `[..., min(m, n)]`."""
  return jnp.linalg.svd(matrix, compute_uv=False)


def angles(v: Array) -> Array:
  """Exact angle parameters theta >= 0 of Q = skew(v), largest first.

  Q's eigenvalues are +-i theta (and a 0 if b is odd), so each theta appears
  twice among its singular values; one of each pair is returned.

  Args:
    v: `[..., b(b-1)/2]`.

  Returns:
    `[..., b // 2]`, dimensionless; a plane turns by 2 arctan(theta) radians.
  """
  q_BB = skew(v)
  return jnp.linalg.svd(q_BB, compute_uv=False)[
    ..., : q_BB.shape[-1] // 2 * 2 : 2
  ]


def largest_angle(v: Array) -> Array:
  """Estimate of max theta over all blocks, from below; cheap enough per step.

  Sixteen power iterations with Q: x_(k+1) = Q x_k, and |x_(k+1)| / |x_k|
  rises towards max theta because -Q^2 is symmetric. `angles` is exact.

  Args:
    v: `[..., b(b-1)/2]`.

  Returns:
    Scalar, v's dtype.
  """
  q_BB = skew(v)
  start = jax.random.normal(jax.random.key(0), (q_BB.shape[-1],), v.dtype)
  x_B = jnp.broadcast_to(start, q_BB.shape[:-1])
  tiny = jnp.finfo(v.dtype).tiny

  def advance(x_B, _):
    x_B = x_B / jnp.maximum(jnp.linalg.norm(x_B, axis=-1, keepdims=True), tiny)
    return jnp.einsum('...ij,...j->...i', q_BB, x_B), ()

  x_B, _ = jax.lax.scan(advance, x_B, length=_POWER_ITERATIONS)
  # Not in the loop: blocks may be shared out, and devices would wait each time.
  return jnp.max(jnp.linalg.norm(x_B, axis=-1))


def neumann_singular_values(theta: Array, terms: int) -> Array:
  """Singular values |1 - (i theta)^(terms+1)| of Cayley-Neumann's planes.

  Example (terms = 3, i.e. 1 - theta^4):
    neumann_singular_values([0., 0.5], 3) = [1., 0.9375]
  """
  power = terms + 1
  real = (1.0, 0.0, -1.0, 0.0)[power % 4]
  imaginary = (0.0, 1.0, 0.0, -1.0)[power % 4]
  size = theta**power
  return jnp.hypot(1.0 - real * size, imaginary * size)


def orthogonality_error(rotation: Array) -> Array:
  """Largest |R^T R - I| entry over all blocks `[..., b, b]`; scalar."""
  gram = jnp.einsum(
    '...ki,...kj->...ij',
    rotation,
    rotation,
    precision=jax.lax.Precision.HIGHEST,
  )
  eye = jnp.eye(rotation.shape[-1], dtype=rotation.dtype)
  return jnp.max(
    jnp.abs(gram - eye.reshape((1,) * (gram.ndim - 2) + eye.shape))
  )


def frobenius_norm(matrix: Array) -> Array:
  """Frobenius norm over the last two axes: `[..., m, n]` -> `[...]`."""
  return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=(-2, -1)))


def spectral_entropy(values: Array) -> Array:
  """How evenly a matrix spreads over its singular directions, in [0, 1].

  Entropy of p_i = sigma_i^2 / sum sigma^2, over its maximum log n: 1 if all
  singular values are equal, 0 if the rank is 1 (Liu et al., `Muon is scalable
  <https://arxiv.org/abs/2502.16982>`_, 2025, section 3.4). Rotations keep it.

  Args:
    values: singular values `[..., n]`, n at least 2, not all 0.

  Returns:
    `[...]`.

  Example:
    spectral_entropy([1., 1.]) = 1.        spectral_entropy([1., 0.]) = 0.
  """
  squares = jnp.square(values)
  p = squares / jnp.sum(squares, axis=-1, keepdims=True)
  return jnp.sum(jax.scipy.special.entr(p), axis=-1) / math.log(p.shape[-1])


def hyperspherical_energy(matrix: Array) -> Array:
  """How close the directions of a layer's neurons come to each other.

  Sum over i != j of 1 / |w_i - w_j| of the normalised neurons (Liu et al.,
  `arXiv 1805.09298 <https://arxiv.org/abs/1805.09298>`_, 2018), over the number
  of pairs. Turning the input side keeps it exactly; turning the output side
  mixes neurons, and keeps it in expectation for normalised Gaussian weights.

  Args:
    matrix: `[..., m, n]` with n neurons, at least 2, as columns.

  Returns:
    `[...]`; about 1 / sqrt(2) for orthogonal or random neurons.

  Example (two opposite neurons; two orthogonal ones):
    hyperspherical_energy([[1, -1]]) = 1 / 2
    hyperspherical_energy([[1, 0], [0, 1]]) = 1 / sqrt(2)
  """
  norm = jnp.linalg.norm(matrix, axis=-2, keepdims=True)
  neurons = matrix / jnp.maximum(norm, jnp.finfo(matrix.dtype).tiny)
  cosine = jnp.einsum(
    '...ki,...kj->...ij', neurons, neurons, precision=jax.lax.Precision.HIGHEST
  )
  count = cosine.shape[-1]
  others = 1 - jnp.eye(count, dtype=matrix.dtype).reshape(
    (1,) * (cosine.ndim - 2) + (count, count)
  )
  # |w_i - w_j|^2 = 2 - 2 cos; equal neurons are held at a distance of 1e-3.
  distance = jnp.sqrt(jnp.maximum(2 - 2 * cosine, 1e-6))
  return jnp.sum(others / distance, axis=(-2, -1)) / (count * (count - 1))
