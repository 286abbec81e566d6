"""Angles, orthogonality and norm drift of an update, as scalars for logs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jaxllm.poet import blocks
from jaxllm.poet import frame as frame_lib
from jaxllm.poet import spectrum
from jaxllm.poet import state as state_lib
from jaxllm.poet.cayley import cayley_neumann
from jaxllm.poet.state import PoetState
from jaxllm.poet.state import Readings
from jaxllm.poet.state import Rotation


def measure(
  state: PoetState,
  params: optax.Params,
  rotations: Sequence[Rotation],
) -> Readings:
  """Angles and orthogonality of the new rotations, drift of the old norms."""
  sides = jax.tree.leaves(rotations)
  angles, errors = [], []
  for group in frame_lib.same_shape(sides):
    v = jnp.stack([sides[i] for i in group])
    angles.append(spectrum.largest_angle(v))
    turned = cayley_neumann(v, state.settings.neumann_terms)
    errors.append(spectrum.orthogonality_error(turned))
  plans = blocks.plans(state.settings.layout, params)
  found = jax.tree.leaves(
    jax.tree.map(state_lib.norms, params, state.w0, plans)
  )
  tiny = jnp.finfo(jnp.float32).tiny
  drifts = [
    jnp.max(jnp.abs(now - then) / jnp.maximum(then, tiny))
    for now, then in zip(found, jax.tree.leaves(state.norms), strict=True)
  ]
  return Readings(
    *(
      jnp.max(jnp.stack(values)).astype(jnp.float32)
      for values in (angles, errors, drifts)
    )
  )
