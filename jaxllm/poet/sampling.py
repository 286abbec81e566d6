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


def permute(
  x_MN: Array, rows_M: Array, columns_N: Array, partitions: int
) -> Array:
  """Gathers rows and columns of a matrix at once.

  Each partition is gathered by itself, so that one that lies on one device
  stays there.

  Args:
    x_MN: `[m, n]`.
    rows_M: row to put at each place; none crosses a partition's border.
    columns_N: the same of the columns.
    partitions: of rows and of columns.

  Example:
    permute([[1, 2, 3], [4, 5, 6]], [1, 0], [2, 0, 1], 1)
      = [[6, 4, 5], [3, 1, 2]]
  """

  def gather(x: Array, rows: Array, columns: Array) -> Array:
    # One gather of single entries: half the time of two of lines on CPU.
    return x.at[rows[:, None], columns[None, :]].get(
      mode='promise_in_bounds', unique_indices=True
    )

  if partitions == 1:
    return gather(x_MN, rows_M, columns_N)
  m, n = x_MN.shape
  rows, columns = (
    indices.reshape(partitions, -1)
    - jnp.arange(partitions, dtype=indices.dtype)[:, None]
    * (indices.size // partitions)
    for indices in (rows_M, columns_N)
  )
  over_columns = jax.vmap(gather, in_axes=(1, None, 0), out_axes=1)
  over_rows = jax.vmap(over_columns, in_axes=(0, 0, None))
  grouped = x_MN.reshape(partitions, m // partitions, partitions, -1)
  return over_rows(grouped, rows, columns).reshape(m, n)


def _orders(key: Array, rows: int, dim: int, partitions: int) -> Array:
  """Random permutations `[rows, dim]` that respect the partitions."""
  size = dim // partitions
  # One sort of 32 random bits: two equal keys keep their order, a bias of
  # less than dim^2 / 2^33.
  bits = jax.random.bits(key, (rows, partitions, size))
  order = jnp.argsort(bits, axis=-1).astype(jnp.int32)
  start = jnp.arange(partitions, dtype=jnp.int32) * size
  return (order + start.reshape(1, partitions, 1)).reshape(rows, dim)
