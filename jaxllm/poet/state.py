"""What `poet` keeps between updates, and how to read W0 and v from it."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from jaxllm.poet import blocks
from jaxllm.poet import spectrum


class Rotation(NamedTuple):
  """Skew coordinates of one weight's two rotations.

  Attributes:
    left: of R, which turns the input side: `[*stack, m / b, b(b-1)/2]`.
    right: of P, which turns the output side: `[*stack, n / b, b(b-1)/2]`.
  """

  left: Array
  right: Array


class Norms(NamedTuple):
  """Frobenius norms `[*stack]` of one weight as the last update wrote it.

  Attributes:
    weight: of W.
    base: of W0, or an empty node where no W0 is stored.
  """

  weight: Array
  base: Any


class Readings(NamedTuple):
  """Scalars of the latest update, for logs and alarms; all 0 before it.

  Attributes:
    largest_angle: max theta over all planes, before a merge zeroes it (an
      estimate from below, `spectrum.largest_angle`). Above 0.5 the truncated
      series visibly contracts, from 1 on it diverges: lower the learning rate
      or merge more often.
    orthogonality_error: max |R^T R - I| entry over all blocks.
    norm_drift: max relative difference between a norm found at the start of
      the update and the one that the update before it wrote. Rounding makes
      1e-6 or less; more means that W or W0 changed in between.
    weight_norm: Frobenius norm of all weights together. Rotations keep it; it
      sinks as far as the truncated series contracts.
  """

  largest_angle: Array
  orthogonality_error: Array
  norm_drift: Array
  weight_norm: Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
  """The arguments of `poet` that decide which W a state describes."""

  layout: blocks.Layout
  neumann_terms: int
  merge_every: int
  resample_every: int
  reset_inner: bool
  seed: int


class PoetState(NamedTuple):
  """State of `poet`.

  Attributes:
    count: number of updates so far, int32.
    w0: per leaf, the fixed base W0 in float32 (or wider), axes as the param's;
      an empty node where `merge_every=1` needs none.
    rotations: per leaf, a `Rotation`; an empty node if `merge_every=1`.
    inner: state of the inner optimizer over the tree of rotations.
    merges: number of merges before the latest update, int32; the permutations
      drawn for it are the ones that `rotations` refer to.
    norms: per leaf, `Norms`.
    readings: `Readings` of the latest update.
    settings: how to rebuild W; a node without arrays.
  """

  count: Array
  w0: Any
  rotations: Any
  inner: optax.OptState
  merges: Array
  norms: Any
  readings: Readings
  settings: Settings


def new_base(settings: Settings, param: Array) -> Any:
  """A copy of the param to keep as W0, or nothing where W itself serves."""
  dtype = base_dtype(param)
  if settings.merge_every == 1 and param.dtype == dtype:
    return optax.MaskedNode()
  # A copy: an alias of the params would be donated twice.
  return jnp.array(param, dtype=dtype, copy=True)


def base_dtype(param: Array) -> jnp.dtype:
  return jnp.promote_types(param.dtype, jnp.float32)


def bases(state: PoetState, params: optax.Params) -> list[Array]:
  """W0 of every leaf; the param itself where none is stored."""
  leaves, tree = jax.tree.flatten(params)
  return [
    param if isinstance(base, optax.MaskedNode) else base
    for param, base in zip(leaves, tree.flatten_up_to(state.w0), strict=True)
  ]


def zero_rotation(param: Array, plan: blocks.Plan) -> Rotation:
  dtype = base_dtype(param)
  return Rotation(
    *(
      jnp.zeros((*plan.stack, side.count, side.num_coordinates), dtype)
      for side in (plan.left, plan.right)
    )
  )


def rotations(state: PoetState, params: optax.Params) -> list[Rotation]:
  """Rotations of every leaf; zeros where none are stored."""
  tree = jax.tree.structure(params)
  if state.settings.merge_every > 1:
    return tree.flatten_up_to(state.rotations)
  plans = blocks.plans(state.settings.layout, params)
  return tree.flatten_up_to(jax.tree.map(zero_rotation, params, plans))


def norms(weight: Array, base: Any, plan: blocks.Plan) -> Norms:
  def norm(x: Array) -> Array:
    return spectrum.frobenius_norm(
      blocks.to_matrix(x, plan.dimensions).astype(base_dtype(x))
    )

  return Norms(
    norm(weight), base if isinstance(base, optax.MaskedNode) else norm(base)
  )


def norm_drift(state: PoetState, params: optax.Params) -> Array:
  """Max relative difference of the norms now to those that `state` holds."""
  plans = blocks.plans(state.settings.layout, params)
  found = jax.tree.leaves(jax.tree.map(norms, params, state.w0, plans))
  tiny = jnp.finfo(jnp.float32).tiny
  drifts = [
    jnp.max(jnp.abs(now - then) / jnp.maximum(then, tiny))
    for now, then in zip(found, jax.tree.leaves(state.norms), strict=True)
  ]
  return jnp.max(jnp.stack(drifts)).astype(jnp.float32)
