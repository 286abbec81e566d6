r"""POET as a change of coordinates around any optax optimizer.

Each weight matrix is W = R W0 P with W0 fixed and R, P orthogonal. An optimizer
that wants to train R and P sees the dense gradient G = dL/dW, so every update

  1. pulls G back to the skew coordinates (v_R, v_P) of the rotations,
  2. runs `inner`, an ordinary optax transform, on those coordinates,
  3. every `merge_every` steps merges: W0 <- R W0 P, v <- 0, new permutations,
  4. rebuilds W = R W0 P and returns W - W_old.

In the frame of the permutations (W' = Psi_R W0 Psi_P^T, see `sampling`) the
rotations are block diagonal, so steps 1 and 4 are batched products of b x b
blocks with slices of W', and no gather is ever differentiated. The params are
the effective weights at all times: nothing is merged before evaluation or
export.

With `merge_every=1` every update starts at v = 0, where the derivative of R W P
is dR W + W dP; W0 is W itself, and neither W0 nor v is stored.

Qiu et al., `Reparameterized LLM Training via Orthogonal Equivalence
Transformation <https://arxiv.org/abs/2506.08001>`_, 2025.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from jaxllm.poet import blocks
from jaxllm.poet import frame as frame_lib
from jaxllm.poet import restart
from jaxllm.poet import state as state_lib
from jaxllm.poet.state import PoetState
from jaxllm.poet.state import Readings
from jaxllm.poet.state import Rotation
from jaxllm.poet.state import Settings


def poet(
  inner: optax.GradientTransformation,
  *,
  block_size: int | None = None,
  fraction: float | None = None,
  neumann_terms: int = 3,
  merge_every: int = 400,
  resample_every: int = 1,
  reset_inner: bool = True,
  partitions: int = 1,
  dimension_numbers: Any = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Trains weight matrices through orthogonal rotations of both sides.

  Put it last in its chain: its update is the change of the weights themselves,
  learning rate included. What `inner` sees, and any clipping in it, is the
  gradient with respect to the skew coordinates. `inner.update` receives the
  extra argument `steps_since_merge` (int32, 0 in the first step after one).

  W_old + (W - W_old) differs from W in the last bit of some elements. With
  `update(grads, state, params, as_weights=True)` the new weights themselves
  come back in place of their change; a step that assigns them makes the params
  a function of the state alone.

  Args:
    inner: any optax transform, learning rate included; its params are a tree
      with a `Rotation` in place of every weight.
    block_size: POET-BS: b, the size of every block; all rows and columns turn.
    fraction: POET-FS: this share of the rows and of the columns turns, in one
      block per partition. Exactly one of `block_size`, `fraction` is given.
    neumann_terms: order k of the Cayley-Neumann series.
    merge_every: merge after so many steps; 1 stores no W0.
    resample_every: draw new permutations at every so many merges. Between two
      draws coordinate i means the same rows and columns, so momentum can
      outlive a merge.
    reset_inner: whether new permutations zero `inner`'s state; the counts of
      schedules and injected hyperparameters run on all the same.
    partitions: permutations stay inside so many contiguous groups of each dim.
    dimension_numbers: which axes are the matrix: a `MatrixDimensions`, a tree
      of them, a function from params to such a tree, or None for the last two
      (input, output). All other axes are a stack of independent matrices.
    seed: of the permutations.

  Returns:
    A transform whose `update(grads, state, params)` requires params.

  Raises:
    ValueError: for settings that cannot work; at init, with path and remedy,
      for a leaf that is no matrix or whose dims the blocks do not divide.

  Example:
    >>> tx = poet(optax.adam(1e-3, eps=1e-6), block_size=2)
    >>> state = tx.init({'kernel': jnp.ones((4, 6))})
    >>> state.rotations['kernel'].right.shape
    (3, 1)
  """
  if merge_every < 1:
    raise ValueError(f'merge_every={merge_every}: give 1 step or more')
  if resample_every < 1:
    raise ValueError(f'resample_every={resample_every}: give 1 merge or more')
  if merge_every * resample_every == 1 and reset_inner:
    raise ValueError(
      'merge_every=1 with reset_inner=True would erase the inner state at every'
      ' step: set reset_inner=False, or resample_every to 100 or so'
    )
  if neumann_terms < 1:
    raise ValueError(f'neumann_terms={neumann_terms}: give 1 or more')
  settings = Settings(
    blocks.Layout(
      block_size, fraction, partitions, blocks.freeze(dimension_numbers)
    ),
    neumann_terms,
    merge_every,
    resample_every,
    reset_inner,
    seed,
  )
  inner = optax.with_extra_args_support(inner)
  return optax.GradientTransformationExtraArgs(
    functools.partial(_init, settings, inner),
    functools.partial(_update, settings, inner),
  )


def effective_weights(state: PoetState, params: optax.Params) -> optax.Params:
  """The weights R W0 P that `state` describes, in the params' dtype.

  Leaves without a stored W0 (`merge_every=1`) are returned as they are.

  Args:
    state: of `poet`, after an update.
    params: the params that `state` belongs to; dtypes and shapes count, and the
      values of leaves without W0.

  Returns:
    A tree like params.
  """
  settings = state.settings
  leaves, tree = jax.tree.flatten(params)
  weights = state_lib.bases(state, params)
  if settings.merge_every > 1:
    plans = tree.flatten_up_to(blocks.plans(settings.layout, params))
    frames = frame_lib.frames(settings, state.merges, plans)
    rotations = tree.flatten_up_to(state.rotations)
    rebuilt = frame_lib.rebuild(settings, plans, frames, weights, rotations)
    weights = [r.weight for r in rebuilt]
  return tree.unflatten(
    weight.astype(param.dtype)
    for weight, param in zip(weights, leaves, strict=True)
  )


def _init(
  settings: Settings,
  inner: optax.GradientTransformationExtraArgs,
  params: optax.Params,
) -> PoetState:
  plans = blocks.plans(settings.layout, params)
  w0 = jax.tree.map(lambda p: state_lib.new_base(settings, p), params)
  coordinates = jax.tree.map(state_lib.zero_rotation, params, plans)
  rotations = coordinates
  if settings.merge_every == 1:
    rotations = jax.tree.map(lambda _: optax.MaskedNode(), params)
  return PoetState(
    count=jnp.zeros([], jnp.int32),
    w0=w0,
    rotations=rotations,
    inner=inner.init(coordinates),
    merges=jnp.zeros([], jnp.int32),
    norms=jax.tree.map(state_lib.norms, params, w0, plans),
    readings=Readings(*(jnp.zeros([], jnp.float32) for _ in Readings._fields)),
    settings=settings,
  )


def _update(
  settings: Settings,
  inner: optax.GradientTransformationExtraArgs,
  updates: optax.Updates,
  state: PoetState,
  params: optax.Params | None = None,
  *,
  as_weights: bool = False,
  **extra_args: Any,
) -> tuple[optax.Updates, PoetState]:
  if params is None:
    raise ValueError('poet rotates the params: pass them to update')
  tree = jax.tree.structure(params)
  plans = tree.flatten_up_to(blocks.plans(settings.layout, params))
  merges = state.count // settings.merge_every
  frames = frame_lib.frames(settings, merges, plans)
  bases = state_lib.bases(state, params)
  before = state_lib.rotations(state, params)
  gradients = frame_lib.pull_back(
    settings, plans, frames, bases, before, tree.flatten_up_to(updates)
  )
  steps, inner_state = inner.update(
    tree.unflatten(gradients),
    state.inner,
    tree.unflatten(before),
    steps_since_merge=state.count % settings.merge_every,
    **extra_args,
  )
  rotations = tree.flatten_up_to(
    optax.apply_updates(tree.unflatten(before), steps)
  )
  rebuilt = frame_lib.rebuild(settings, plans, frames, bases, rotations)
  weights = tree.unflatten(
    r.weight.astype(param.dtype)
    for r, param in zip(rebuilt, jax.tree.leaves(params), strict=True)
  )
  readings = Readings(
    largest_angle=_largest([r.largest_angle for r in rebuilt]),
    orthogonality_error=_largest([r.orthogonality_error for r in rebuilt]),
    norm_drift=state_lib.norm_drift(state, params),
    weight_norm=optax.tree.norm([r.weight for r in rebuilt]).astype(
      jnp.float32
    ),
  )
  state = _merge_when_due(
    state._replace(inner=inner_state, merges=merges, readings=readings),
    inner,
    tree,
    [r.weight for r in rebuilt],
    rotations,
  )
  norms = jax.tree.map(
    state_lib.norms, weights, state.w0, tree.unflatten(plans)
  )
  state = state._replace(count=optax.safe_increment(state.count), norms=norms)
  if as_weights:
    return weights, state
  return jax.tree.map(jnp.subtract, weights, params), state


def _merge_when_due(
  state: PoetState,
  inner: optax.GradientTransformationExtraArgs,
  tree: jax.tree_util.PyTreeDef,
  weights: Sequence[Array],
  rotations: Sequence[Rotation],
) -> PoetState:
  """The state with the new rotations, or merged if this step ends with that.

  Args:
    state: with the new inner state; count, W0 and rotations of before.
    inner: the inner optimizer.
    tree: structure of the params.
    weights: R W0 P of every leaf, in W0's dtype.
    rotations: the new ones.
  """
  settings = state.settings
  is_due = (state.count + 1) % settings.merge_every == 0
  # Where W itself serves as W0, none is stored.
  w0 = tree.unflatten(
    base
    if isinstance(base, optax.MaskedNode)
    else jnp.where(is_due, weight, base)
    for weight, base in zip(weights, tree.flatten_up_to(state.w0), strict=True)
  )
  zeros = tree.unflatten(jax.tree.map(jnp.zeros_like, rotations))
  if settings.reset_inner:
    interval = settings.merge_every * settings.resample_every
    fresh = restart.restart(state.inner, inner.init(zeros))
    state = state._replace(
      inner=jax.tree.map(
        functools.partial(jnp.where, (state.count + 1) % interval == 0),
        fresh,
        state.inner,
      )
    )
  if settings.merge_every == 1:
    return state._replace(w0=w0)
  rotations = jax.tree.map(
    functools.partial(jnp.where, is_due), zeros, tree.unflatten(rotations)
  )
  return state._replace(w0=w0, rotations=rotations)


def _largest(values: Sequence[Array]) -> Array:
  return jnp.max(jnp.stack([jnp.max(value) for value in values])).astype(
    jnp.float32
  )
