"""Which parts of an inner optimizer's state survive new permutations.

Under other permutations the old moments are meaningless: they belong to other
rows. The published procedure zeroes them together with the step count of their
bias correction, while the learning-rate schedule runs on.
"""

from typing import Any

import jax
import optax

# States whose counts say how far training is.
_KEPT = (optax.ScaleByScheduleState,)
_INJECTED = (
  optax.InjectHyperparamsState,
  optax.InjectStatefulHyperparamsState,
)


def restart(state: optax.OptState, fresh: optax.OptState) -> optax.OptState:
  """Returns `fresh` with the schedule counts and hyperparameters of `state`.

  Args:
    state: inner state before them.
    fresh: `inner.init` of the merged coordinates; same structure.
  """

  def choose(old: Any, new: Any) -> Any:
    if isinstance(old, _KEPT):
      return old
    if isinstance(old, _INJECTED):
      return old._replace(inner_state=restart(old.inner_state, new.inner_state))
    return new

  return jax.tree.map(
    choose, state, fresh, is_leaf=lambda x: isinstance(x, _KEPT + _INJECTED)
  )
