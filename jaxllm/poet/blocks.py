"""Where a weight's rotations act: matrix axes, block sizes, block products.

In the frame of the permutations R and P are block diagonal. A side of length
`dim` is split into `partitions` contiguous groups; the first blocks of every
group turn. Block-stochastic: the blocks fill the group. Fully stochastic: one
block takes `fraction` of it and the rest stays.

  partitions = 2, dim = 8, block_size = 2:   [aa bb | cc dd]  4 blocks of 2
  partitions = 2, dim = 8, fraction = 1/2:   [aa .. | bb ..]  2 blocks of 2
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

_PRECISION = jax.lax.Precision.HIGHEST


class MatrixDimensions(NamedTuple):
  """The two axes of a leaf that are the matrix; the others are a stack.

  Attributes:
    input: axis that the layer sums over (fan-in); turned by R.
    output: axis of the neurons (fan-out); turned by P.
  """

  input: int = -2
  output: int = -1


@dataclasses.dataclass(frozen=True)
class Layout:
  """Block size or fraction, partitions and matrix axes, all as given."""

  block_size: int | None
  fraction: float | None
  partitions: int
  dimension_numbers: Any

  def __post_init__(self):
    if (self.block_size is None) == (self.fraction is None):
      raise ValueError(
        f'block_size={self.block_size}, fraction={self.fraction}: give exactly'
        ' one (block_size turns every row, fraction a random share of them)'
      )
    if self.block_size is not None and self.block_size < 2:
      raise ValueError(f'block_size={self.block_size}: a rotation needs 2 rows')
    if self.fraction is not None and not 0 < self.fraction <= 1:
      raise ValueError(f'fraction={self.fraction} is not in (0, 1]')
    if self.partitions < 1:
      raise ValueError(f'partitions={self.partitions}: give 1 or more')


class Side(NamedTuple):
  """Blocks of one side: `count` of them, `size` rows each, over `dim` rows."""

  dim: int
  count: int
  size: int

  @property
  def num_coordinates(self) -> int:
    """Skew coordinates of one block: b(b-1)/2."""
    return self.size * (self.size - 1) // 2


class Plan(NamedTuple):
  """How one leaf splits: its matrix axes, stack axes and two sides."""

  dimensions: MatrixDimensions
  stack: tuple[int, ...]
  left: Side
  right: Side


def freeze(dimension_numbers: Any) -> Any:
  """Makes `dimension_numbers` hashable: a tree becomes (path, dims) pairs."""
  if (
    dimension_numbers is None
    or callable(dimension_numbers)
    or isinstance(dimension_numbers, MatrixDimensions)
  ):
    return dimension_numbers
  leaves = jax.tree_util.tree_leaves_with_path(
    dimension_numbers, is_leaf=lambda x: isinstance(x, MatrixDimensions)
  )
  return tuple(
    (jax.tree_util.keystr(path), dimensions) for path, dimensions in leaves
  )


def plans(layout: Layout, params: Any) -> Any:
  """Tree of `Plan`s, one for every weight of `params`.

  Raises:
    ValueError: with the leaf's path, for one that the layout does not fit.
  """
  numbers = layout.dimension_numbers
  if callable(numbers):
    numbers = freeze(numbers(params))

  def plan(path, param) -> Plan:
    name = jax.tree_util.keystr(path)
    dimensions = numbers
    if numbers is None:
      dimensions = MatrixDimensions()
    elif not isinstance(numbers, MatrixDimensions):
      dimensions = dict(numbers).get(name)
    if not isinstance(dimensions, MatrixDimensions):
      raise ValueError(f'dimension_numbers names no matrix axes for {name}')
    return _plan(layout, name, jnp.shape(param), dimensions)

  return jax.tree_util.tree_map_with_path(plan, params)


def to_matrix(x: Array, dimensions: MatrixDimensions) -> Array:
  """Moves the matrix axes last: `[*stack, m, n]`."""
  return jnp.moveaxis(x, dimensions, (-2, -1))


def from_matrix(x: Array, dimensions: MatrixDimensions) -> Array:
  """Undoes `to_matrix`."""
  return jnp.moveaxis(x, (-2, -1), dimensions)


def turn(w: Array, r: Array, p: Array, partitions: int) -> Array:
  """R W P for block-diagonal R and P; see `turn_rows` and `turn_columns`."""
  return turn_columns(turn_rows(w, r, partitions), p, partitions)


def turn_rows(w: Array, r: Array, partitions: int) -> Array:
  """Diag(blocks) W: left-multiplies the leading rows of every partition.

  Args:
    w: `[*stack, m, n]`.
    r: `[*stack, blocks, b, b]`.
    partitions: contiguous groups of rows.

  Returns:
    `[*stack, m, n]`; rows outside the blocks as they were.
  """
  *stack, m, n = w.shape
  count, size = r.shape[-3:-1]
  grouped = w.reshape(*stack, partitions, m // partitions, n)
  turned = count * size // partitions
  head = grouped[..., :turned, :].reshape(*stack, count, size, n)
  head = jnp.einsum('...gij,...gjn->...gin', r, head, precision=_PRECISION)
  head = head.reshape(*stack, partitions, turned, n)
  if turned < m // partitions:
    head = jnp.concatenate([head, grouped[..., turned:, :]], axis=-2)
  return head.reshape(w.shape)


def turn_columns(w: Array, p: Array, partitions: int) -> Array:
  """W Diag(blocks): right-multiplies the leading columns of every partition.

  Args:
    w: `[*stack, m, n]`.
    p: `[*stack, blocks, b, b]`.
    partitions: contiguous groups of columns.

  Returns:
    `[*stack, m, n]`; columns outside the blocks as they were.
  """
  *stack, m, n = w.shape
  count, size = p.shape[-3:-1]
  grouped = w.reshape(*stack, m, partitions, n // partitions)
  turned = count * size // partitions
  # Blocks first: XLA's CPU backend runs '...mgi,...gij->...mgj' twice as slow.
  head = grouped[..., :turned].reshape(*stack, m, count, size)
  head = jnp.matmul(jnp.swapaxes(head, -3, -2), p, precision=_PRECISION)
  head = jnp.swapaxes(head, -3, -2).reshape(*stack, m, partitions, turned)
  if turned < n // partitions:
    head = jnp.concatenate([head, grouped[..., turned:]], axis=-1)
  return head.reshape(w.shape)


def stacked_by_shape(
  function: Callable[[Array], Array], arrays: Sequence[Array]
) -> list[Array]:
  """Applies `function` to arrays of one shape stacked along a new first axis.

  A tenth of the products to compile than one call each. On a mesh of several
  devices (`jax.set_mesh`) every array goes alone: stacked, one that is shared
  out along its blocks and one that is not would both end up on every device.

  Args:
    function: `[g, *shape]` -> `[g, *any]`, independent along the first axis.
    arrays: of any shapes and dtypes.
  """
  apart = jax.sharding.get_abstract_mesh().size > 1
  groups = {}
  for i, array in enumerate(arrays):
    group = i if apart else (array.shape, array.dtype)
    groups.setdefault(group, []).append(i)
  found = {}
  for group in groups.values():
    result = function(jnp.stack([arrays[i] for i in group]))
    # A split, not an index per entry: its transpose is one concatenation.
    for i, part in zip(
      group, jax.lax.split(result, [1] * len(group)), strict=True
    ):
      found[i] = jax.lax.squeeze(part, [0])
  return [found[i] for i in range(len(arrays))]


def _plan(
  layout: Layout,
  name: str,
  shape: tuple[int, ...],
  dimensions: MatrixDimensions,
) -> Plan:
  rank = len(shape)
  if rank < 2:
    raise ValueError(
      f'POET rotates matrices, but {name} has shape {shape}: give this leaf to'
      ' another optimizer (optax.partition)'
    )
  if not all(-rank <= axis < rank for axis in dimensions):
    raise ValueError(f'{dimensions} are not axes of {name}, shape {shape}')
  axes = tuple(axis % rank for axis in dimensions)
  if axes[0] == axes[1]:
    raise ValueError(f'{dimensions} names one axis of {name} twice')
  stack = tuple(d for axis, d in enumerate(shape) if axis not in axes)
  left, right = (
    _side(layout, f'{name} axis {axis} (shape {shape})', shape[axis])
    for axis in axes
  )
  return Plan(MatrixDimensions(*axes), stack, left, right)


def _side(layout: Layout, where: str, dim: int) -> Side:
  if dim % layout.partitions:
    raise ValueError(
      f'partitions={layout.partitions} does not divide {dim}, {where}: choose a'
      ' divisor'
    )
  group = dim // layout.partitions
  if layout.block_size is not None:
    if group % layout.block_size:
      raise ValueError(
        f'block_size={layout.block_size} does not divide {group} ({dim} in'
        f' {layout.partitions} partitions), {where}: choose a divisor, change'
        ' the width, or give this leaf to another optimizer'
      )
    return Side(dim, dim // layout.block_size, layout.block_size)
  size = layout.fraction * group
  if size != int(size) or size < 2:
    raise ValueError(
      f'fraction={layout.fraction} of {group} is {size:g} rows, {where}: it'
      ' must be a whole number of 2 or more'
    )
  return Side(dim, layout.partitions, int(size))
