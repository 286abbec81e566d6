"""One weight in the frame of its permutations: pull back and rebuild."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from jaxllm.poet import blocks
from jaxllm.poet import sampling
from jaxllm.poet.cayley import cayley_neumann
from jaxllm.poet.cayley import skew
from jaxllm.poet.state import Rotation
from jaxllm.poet.state import Settings


class Frame(NamedTuple):
  """One leaf's plan, and the permutations of its rows and columns."""

  plan: blocks.Plan
  rows: sampling.Permutation
  columns: sampling.Permutation

  def enter(self, weight: Array) -> Array:
    """Psi_R W Psi_P^T, matrix axes last: `[*stack, m, n]`."""
    matrix = blocks.to_matrix(weight, self.plan.dimensions)
    return sampling.permute(matrix, self.rows.order, self.columns.order)

  def leave(self, matrix: Array) -> Array:
    """Undoes `enter`."""
    matrix = sampling.permute(matrix, self.rows.inverse, self.columns.inverse)
    return blocks.from_matrix(matrix, self.plan.dimensions)


def frames(
  settings: Settings, merges: Array, plans: Sequence[blocks.Plan]
) -> list[Frame]:
  """One frame per leaf, as drawn after `merges` merges."""
  shapes = [
    (*plan.stack, side.dim)
    for plan in plans
    for side in (plan.left, plan.right)
  ]
  sides = sampling.draw(
    settings.seed, merges, shapes, settings.layout.partitions
  )
  return [
    Frame(plan, rows, columns)
    for plan, rows, columns in zip(plans, sides[::2], sides[1::2], strict=True)
  ]


def pull_back(
  settings: Settings,
  frames: Sequence[Frame],
  bases: Sequence[Array],
  rotations: Sequence[Rotation],
  gradients: Sequence[Array],
) -> list[Rotation]:
  """Gradients with respect to the skew coordinates, from the dense ones."""
  partitions = settings.layout.partitions
  entered = [
    frame.enter(base) for frame, base in zip(frames, bases, strict=True)
  ]

  def turn(rotations: Sequence[Rotation]) -> list[Array]:
    if settings.merge_every == 1:
      # At v = 0: R = I + 2Q to first order, and d(R W P) = dR W + W dP.
      return [
        blocks.turn_rows(base, 2 * skew(left), partitions)
        + blocks.turn_columns(base, 2 * skew(right), partitions)
        for base, (left, right) in zip(entered, rotations, strict=True)
      ]
    return [
      blocks.turn_columns(
        blocks.turn_rows(base, left, partitions), right, partitions
      )
      for base, (left, right) in zip(
        entered, rotation_blocks(settings, rotations), strict=True
      )
    ]

  _, pull = jax.vjp(turn, rotations)
  (coordinates,) = pull(
    [
      frame.enter(gradient.astype(base.dtype))
      for frame, base, gradient in zip(frames, bases, gradients, strict=True)
    ]
  )
  return coordinates


def rebuild(
  settings: Settings,
  frames: Sequence[Frame],
  bases: Sequence[Array],
  rotations: Sequence[Rotation],
) -> list[Array]:
  """W = R W0 P of every leaf, in its base's dtype and axes."""
  partitions = settings.layout.partitions
  weights = []
  for frame, base, (left, right) in zip(
    frames, bases, rotation_blocks(settings, rotations), strict=True
  ):
    matrix = blocks.turn_rows(frame.enter(base), left, partitions)
    matrix = blocks.turn_columns(matrix, right, partitions)
    weights.append(frame.leave(matrix))
  return weights


def rotation_blocks(
  settings: Settings, rotations: Sequence[Rotation]
) -> list[Rotation]:
  """Orthogonal blocks `[*stack, blocks, b, b]` of every side.

  Sides of one shape are stacked along a new axis and computed together: a tenth
  of the products to compile, and the blocks axis keeps its sharding.
  """
  sides, tree = jax.tree.flatten(rotations)
  found = {}
  for group in same_shape(sides):
    stacked = cayley_neumann(
      jnp.stack([sides[i] for i in group]), settings.neumann_terms
    )
    # A split, not an index per entry: its transpose is one concatenation.
    for i, part in zip(
      group, jax.lax.split(stacked, [1] * len(group)), strict=True
    ):
      found[i] = jax.lax.squeeze(part, [0])
  return tree.unflatten(found[i] for i in range(len(sides)))


def same_shape(arrays: Sequence[Array]) -> list[list[int]]:
  """Indices grouped by shape and dtype, in order of first appearance."""
  groups = {}
  for i, x in enumerate(arrays):
    groups.setdefault((x.shape, x.dtype), []).append(i)
  return list(groups.values())
