"""What a POET state holds."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxllm.poet import poet


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    # Table 1 counts W0 and 3 x the coordinates; W itself is the params'.
    ({'block_size': 8}, 32 * 48 + 3 * (32 + 48) * 7 // 2),
    ({'fraction': 0.5}, 32 * 48 + 3 * (16 * 15 + 24 * 23) // 2),
    (
      {'block_size': 8, 'merge_every': 1, 'reset_inner': False},
      (32 + 48) * 7,
    ),
  ],
)
def test_state_has_the_size_of_the_published_formula(arguments, expected):
  params = {'w': jax.ShapeDtypeStruct((32, 48), jnp.float32)}
  tx = poet(optax.adam(1e-3), **arguments)
  state = jax.eval_shape(tx.init, params)
  size = sum(leaf.size for leaf in jax.tree.leaves(state))
  # Counts, two norms, readings.
  assert expected <= size <= expected + 10

  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  memory = jax.jit(step).lower(params, state, params).compile()
  taken = memory.memory_analysis().argument_size_in_bytes / 4
  assert expected + 2 * 32 * 48 <= taken <= expected + 2 * 32 * 48 + 10
