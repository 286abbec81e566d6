"""Pull gradients back to the rotations, and rebuild weights from them.

Both go through a stack of layers one layer at a time (`lax.map`), so that the
work space is one layer's, and fits a CPU's caches.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from jaxllm.poet import blocks
from jaxllm.poet import sampling
from jaxllm.poet import spectrum
from jaxllm.poet.cayley import cayley_neumann
from jaxllm.poet.cayley import skew
from jaxllm.poet.state import Rotation
from jaxllm.poet.state import Settings


class Frame(NamedTuple):
  """The permutations of one leaf's rows and columns."""

  rows: sampling.Permutation
  columns: sampling.Permutation

  def enter(self, matrix: Array, partitions: int) -> Array:
    """Psi_R W Psi_P^T of one matrix `[m, n]`."""
    return sampling.permute(
      matrix, self.rows.order, self.columns.order, partitions
    )

  def leave(self, matrix: Array, partitions: int) -> Array:
    """Undoes `enter`."""
    return sampling.permute(
      matrix, self.rows.inverse, self.columns.inverse, partitions
    )


class Rebuilt(NamedTuple):
  """A weight with readings of its rotations.

  Attributes:
    weight: R W0 P, in its base's dtype and axes.
    largest_angle: per stack entry, max theta of both sides.
    orthogonality_error: per stack entry, max |R^T R - I| of both sides.
  """

  weight: Array
  largest_angle: Array
  orthogonality_error: Array


def frames(
  settings: Settings, merges: Array, plans: Sequence[blocks.Plan]
) -> list[Frame]:
  """One frame per leaf, as in force after `merges` merges."""
  shapes = [
    (*plan.stack, side.dim)
    for plan in plans
    for side in (plan.left, plan.right)
  ]
  sides = sampling.draw(
    settings.seed,
    merges // settings.resample_every,
    shapes,
    settings.layout.partitions,
  )
  return [
    Frame(rows, columns)
    for rows, columns in zip(sides[::2], sides[1::2], strict=True)
  ]


def pull_back(
  settings: Settings,
  plans: Sequence[blocks.Plan],
  frames: Sequence[Frame],
  bases: Sequence[Array],
  rotations: Sequence[Rotation],
  gradients: Sequence[Array],
) -> list[Rotation]:
  """Gradients with respect to the skew coordinates, from the dense ones."""
  partitions = settings.layout.partitions

  def one_layer(leaves: Sequence[Any]) -> list[Rotation]:
    frames, bases, rotations, gradients = zip(*leaves, strict=True)
    entered = [
      f.enter(base, partitions) for f, base in zip(frames, bases, strict=True)
    ]

    def turn(rotations: Sequence[Rotation]) -> list[Array]:
      if settings.merge_every == 1:
        # At v = 0: R = I + 2Q to first order, and d(R W P) = dR W + W dP.
        return [
          blocks.turn_rows(base, 2 * skew(left), partitions)
          + blocks.turn_columns(base, 2 * skew(right), partitions)
          for base, (left, right) in zip(entered, rotations, strict=True)
        ]
      turned = rotation_blocks(settings, rotations)
      return [
        blocks.turn(base, *sides, partitions)
        for base, sides in zip(entered, turned, strict=True)
      ]

    _, pull = jax.vjp(turn, list(rotations))
    (coordinates,) = pull(
      [
        frame.enter(gradient.astype(base.dtype), partitions)
        for frame, base, gradient in zip(frames, bases, gradients, strict=True)
      ]
    )
    return coordinates

  matrices, gradients = (
    [
      blocks.to_matrix(x, plan.dimensions)
      for x, plan in zip(arrays, plans, strict=True)
    ]
    for arrays in (bases, gradients)
  )
  leaves = list(zip(frames, matrices, rotations, gradients, strict=True))
  return _layer_by_layer(one_layer, plans, leaves)


def rebuild(
  settings: Settings,
  plans: Sequence[blocks.Plan],
  frames: Sequence[Frame],
  bases: Sequence[Array],
  rotations: Sequence[Rotation],
) -> list[Rebuilt]:
  """R W0 P of every leaf."""
  partitions = settings.layout.partitions

  def one_layer(leaves: Sequence[Any]) -> list[Rebuilt]:
    frames, bases, rotations = zip(*leaves, strict=True)
    return [
      Rebuilt(
        frame.leave(
          blocks.turn(frame.enter(base, partitions), *sides, partitions),
          partitions,
        ),
        jnp.max(jnp.stack([spectrum.largest_angle(v) for v in rotation])),
        jnp.max(jnp.stack([spectrum.orthogonality_error(r) for r in sides])),
      )
      for frame, base, rotation, sides in zip(
        frames,
        bases,
        rotations,
        rotation_blocks(settings, rotations),
        strict=True,
      )
    ]

  matrices = [
    blocks.to_matrix(base, plan.dimensions)
    for base, plan in zip(bases, plans, strict=True)
  ]
  leaves = list(zip(frames, matrices, rotations, strict=True))
  rebuilt = _layer_by_layer(one_layer, plans, leaves)
  return [
    r._replace(weight=blocks.from_matrix(r.weight, plan.dimensions))
    for r, plan in zip(rebuilt, plans, strict=True)
  ]


def rotation_blocks(
  settings: Settings, rotations: Sequence[Rotation]
) -> list[Rotation]:
  """Orthogonal blocks `[*stack, blocks, b, b]` of every side."""
  sides, tree = jax.tree.flatten(list(rotations))
  return tree.unflatten(
    blocks.stacked_by_shape(
      lambda v: cayley_neumann(v, settings.neumann_terms), sides
    )
  )


def _layer_by_layer(
  function: Callable[[Sequence[Any]], list[Any]],
  plans: Sequence[blocks.Plan],
  leaves: Sequence[Any],
) -> list[Any]:
  """Maps `function` over the stack axes, all leaves of one stack together.

  Args:
    function: from a list over leaves of trees without stack axes to another.
    plans: one per leaf.
    leaves: one tree per leaf; all its arrays begin with the leaf's stack axes.
  """
  found = {}
  for stack in dict.fromkeys(plan.stack for plan in plans):
    group = [i for i, plan in enumerate(plans) if plan.stack == stack]
    flat = jax.tree.map(
      lambda x, stack=stack: x.reshape(
        math.prod(stack), *x.shape[len(stack) :]
      ),
      [leaves[i] for i in group],
    )
    outputs = jax.tree.map(
      lambda x, stack=stack: x.reshape(*stack, *x.shape[1:]),
      jax.lax.map(function, flat),
    )
    found.update(zip(group, outputs, strict=True))
  return [found[i] for i in range(len(plans))]
