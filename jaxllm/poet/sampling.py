"""Which rows and columns a rotation touches: permutations from a seed.

POET-BS splits a randomly permuted dim into blocks of size b and turns every
block; POET-FS turns only the first block. Both are a permutation here, and
R = Psi^T Diag(blocks) Psi with (Psi x)_i = x_pi(i). The permutations are drawn
anew after merges, for every layer and side, and never cross the border
between two partitions (contiguous groups of the dim), so that a mesh axis that
divides `partitions` never moves a row between devices.

Qiu et al., `arXiv 2506.08001 <https://arxiv.org/abs/2506.08001>`_, section 3.3.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp


class Permutation(NamedTuple):
  """Permutations of one side, `[*stack, dim]` int32.

  Attributes:
    order: pi; `permute` puts row pi(i) at i.
    inverse: undoes it.

  Example:
    order = [2, 0, 1], inverse = [1, 2, 0]
  """

  order: Array
  inverse: Array


def draw(
  seed: int, draws: Array, shapes: Sequence[tuple[int, ...]], partitions: int
) -> list[Permutation]:
  """Independent, uniform permutations inside each partition.

  Sides of equal length share one sort, which keeps the program small.

  Args:
    seed: of the run.
    draws: how many draws came before, int32 scalar.
    shapes: `(*stack, dim)` of each side; dim is a multiple of `partitions`.
    partitions: number of contiguous groups that do not mix.

  Returns:
    One `Permutation` per shape.

  Example (shapes=[(6,)], partitions=2; one possible draw):
    order = [1, 2, 0,  5, 3, 4]
  """
  key = jax.random.fold_in(jax.random.key(seed), draws)
  found = {}
  for dim in sorted({shape[-1] for shape in shapes}):
    members = [i for i, shape in enumerate(shapes) if shape[-1] == dim]
    rows = [math.prod(shapes[i][:-1]) for i in members]
    order = _orders(jax.random.fold_in(key, dim), sum(rows), dim, partitions)
    inverse = jnp.argsort(order, axis=-1).astype(jnp.int32)
    start = 0
    for i, count in zip(members, rows, strict=True):
      at = slice(start, start + count)
      found[i] = Permutation(
        order[at].reshape(shapes[i]), inverse[at].reshape(shapes[i])
      )
      start += count
  return [found[i] for i in range(len(shapes))]


def permute(x_MN: Array, rows_M: Array, columns_N: Array) -> Array:
  """Gathers rows and columns of a matrix at once.

  Example:
    permute([[1, 2, 3], [4, 5, 6]], [1, 0], [2, 0, 1]) = [[6, 4, 5], [3, 1, 2]]
  """
  # One gather of single entries: half the time of two gathers of lines on CPU.
  return x_MN.at[rows_M[:, None], columns_N[None, :]].get(
    mode='promise_in_bounds', unique_indices=True
  )


def _orders(key: Array, rows: int, dim: int, partitions: int) -> Array:
  """Random permutations `[rows, dim]` that respect the partitions."""
  size = dim // partitions
  # One sort of 32 random bits: two equal keys keep their order, a bias of
  # less than dim^2 / 2^33.
  bits = jax.random.bits(key, (rows, partitions, size))
  order = jnp.argsort(bits, axis=-1).astype(jnp.int32)
  start = jnp.arange(partitions, dtype=jnp.int32) * size
  return (order + start.reshape(1, partitions, 1)).reshape(rows, dim)
