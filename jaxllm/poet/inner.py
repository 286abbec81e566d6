"""Optimizers for skew coordinates: plain optax transforms, made to be combined.

Any optax transform can run inside `poet`. These use that a coordinate vector is
a skew matrix Q whose planes turn by 2 arctan(theta) each:

  optax.chain(
    optax.trace(decay=0.95, nesterov=True),  # momentum, kept across merges
    orthogonalize(),                         # every plane turns alike
    alternate_sides(),                       # R in one step, P in the next
    scale_by_angle(0.015),                   # radians per step
  )

Vectors of these trees are `[*stack, blocks, b(b-1)/2]`; see
`jaxllm.poet.Rotation`.
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.poet import blocks
from jaxllm.poet.cayley import block_size
from jaxllm.poet.cayley import skew
from jaxllm.poet.state import Rotation

_PRECISION = jax.lax.Precision.HIGHEST
# Quintic of steepest slope at 0 (Jordan et al., Muon, 2024): five steps bring
# singular values above 0.01 of the largest into about [0.7, 1.2].
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def clip_by_ramped_norm(
  max_norm: float, *, ramp_steps: int = 10, start: float = 0.1
) -> optax.GradientTransformationExtraArgs:
  """Clips the global norm harder in the first steps after a merge.

  The threshold is `start * max_norm` in the step after a merge and rises
  linearly to `max_norm` over `ramp_steps` steps (arXiv 2506.08001, appendix E).
  Adam undoes any scaling that lasts, so with it the ramp acts through epsilon
  and through the change of scale. Before the first merge there is a ramp, too.

  Args:
    max_norm: threshold of the global norm, away from merges.
    ramp_steps: length of the ramp; `poet` must merge less often than that.
    start: share of the threshold right after a merge.

  Returns:
    A transform that needs the extra argument `steps_since_merge`, as `poet`
    gives it.

  Example (max_norm=1, ramp_steps=10; steps_since_merge -> threshold):
    0 -> 0.1    5 -> 0.55    10 -> 1    11 -> 1
  """
  if not max_norm > 0 or ramp_steps < 1 or not 0 < start <= 1:
    raise ValueError(
      f'max_norm={max_norm}, ramp_steps={ramp_steps}, start={start}: give a'
      ' norm above 0, 1 step or more, and a share in (0, 1]'
    )

  def update(
    updates: Any,
    state: optax.EmptyState,
    params: Any = None,
    *,
    steps_since_merge: Array,
    **extra_args: Any,
  ) -> tuple[Any, optax.EmptyState]:
    del params, extra_args
    done = jnp.minimum(steps_since_merge / ramp_steps, 1.0)
    threshold = max_norm * (start + (1.0 - start) * done)
    norm = optax.tree.norm(updates)
    factor = threshold / jnp.maximum(norm, threshold)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


def orthogonalize(*, steps: int = 5) -> optax.GradientTransformation:
  """Replaces every block's Q by its orthogonal polar factor, approximately.

  All planes of the result turn by about the same angle parameter: theta is near
  1 where the direction was not tiny. Newton-Schulz iterates an odd polynomial,
  so Q stays skew: X <- X (a + b A + c A^2) with A = -X^2.

  Args:
    steps: Newton-Schulz iterations; 5 bring theta into about [0.7, 1.2].
  """
  if steps < 1:
    raise ValueError(f'steps={steps}: give 1 Newton-Schulz step or more')

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    leaves, tree = jax.tree.flatten(updates)
    return tree.unflatten(
      blocks.stacked_by_shape(lambda v: _newton_schulz(v, steps), leaves)
    ), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def alternate_sides() -> optax.GradientTransformation:
  """Turns R in even steps and P in odd ones; the other side's update is 0.

  Put it behind anything with memory, so that both sides' momenta see every
  gradient. Its count runs on when a merge resets the inner state.

  Example (updates of steps 0 and 1):
    Rotation(left=v, right=w) -> Rotation(v, 0), then Rotation(0, w)
  """

  def update(
    updates: Any, state: optax.ScaleByScheduleState, params: Any = None
  ) -> tuple[Any, optax.ScaleByScheduleState]:
    del params
    is_left = state.count % 2 == 0

    def choose(rotation: Rotation) -> Rotation:
      left, right = rotation
      return Rotation(jnp.where(is_left, left, 0), jnp.where(is_left, 0, right))

    chosen = jax.tree.map(
      choose, updates, is_leaf=lambda x: isinstance(x, Rotation)
    )
    return chosen, optax.ScaleByScheduleState(optax.safe_increment(state.count))

  # The state's type tells `restart` that this count outlives a merge.
  return optax.GradientTransformation(
    lambda params: optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), update
  )


def scale_by_angle(
  angle: float | optax.Schedule,
) -> optax.GradientTransformation:
  """Makes every block turn by `angle`, whatever the size of its direction.

  Q is scaled so that the root mean square of its planes' theta is
  tan(angle / 2): a plane of that theta turns by `angle`. The sign is flipped,
  as in `optax.scale_by_learning_rate`: this is a chain's learning rate. A block
  of zeros stays zero. Steps of 0.012 to 0.018 are stable for orthogonalised
  directions; from 0.024 on they diverge in 60M-parameter models.

  Args:
    angle: radians per step, or a schedule of them.

  Example (b = 2, where v is theta itself):
    scale_by_angle(0.02): [5.0] -> [-0.010000333], R turns by 0.02 rad
  """

  def update(
    updates: Any, state: optax.ScaleByScheduleState, params: Any = None
  ) -> tuple[Any, optax.ScaleByScheduleState]:
    del params
    radians = angle(state.count) if callable(angle) else angle
    theta = jnp.tan(jnp.asarray(radians) / 2)

    def turn(v: Array) -> Array:
      planes = block_size(v.shape[-1]) // 2
      # |Q|_F^2 = 2 |v|^2 = 2 sum theta^2.
      root = jnp.linalg.norm(v, axis=-1, keepdims=True) / np.sqrt(planes)
      return (
        -theta.astype(v.dtype) * v / jnp.maximum(root, jnp.finfo(v.dtype).tiny)
      )

    return jax.tree.map(turn, updates), optax.ScaleByScheduleState(
      optax.safe_increment(state.count)
    )

  return optax.GradientTransformation(
    lambda params: optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), update
  )


def _newton_schulz(v: Array, steps: int) -> Array:
  """Coordinates `[..., b(b-1)/2]` of the polar factors of skew(v)."""
  a, b, c = _NEWTON_SCHULZ
  q_BB = skew(v)
  norm = jnp.linalg.norm(q_BB, axis=(-2, -1), keepdims=True)
  q_BB = q_BB / jnp.maximum(norm, jnp.finfo(v.dtype).tiny)
  for _ in range(steps):
    gram_BB = -jnp.matmul(q_BB, q_BB, precision=_PRECISION)
    poly_BB = b * gram_BB + c * jnp.matmul(
      gram_BB, gram_BB, precision=_PRECISION
    )
    q_BB = a * q_BB + jnp.matmul(poly_BB, q_BB, precision=_PRECISION)
  rows, columns = np.triu_indices(q_BB.shape[-1], k=1)
  flat = q_BB.reshape(*q_BB.shape[:-2], -1)
  # The mean of both triangles: rounding does not make Q less skew.
  upper = jnp.take(flat, rows * q_BB.shape[-1] + columns, axis=-1)
  lower = jnp.take(flat, columns * q_BB.shape[-1] + rows, axis=-1)
  return (upper - lower) / 2
