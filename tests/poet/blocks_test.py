"""How leaves split into blocks, and the leaves that do not."""

import jax.numpy as jnp
import optax
import pytest

from jaxllm.poet import poet


@pytest.mark.parametrize(
  ('shape', 'arguments', 'message'),
  [
    ((8,), {'block_size': 4}, 'rotates matrices.*bias'),
    ((8, 10), {'block_size': 4}, 'block_size=4 does not divide 10.*bias'),
    ((8, 12), {'block_size': 4, 'partitions': 2}, 'does not divide 6'),
    ((8, 12), {'block_size': 4, 'partitions': 5}, 'partitions=5'),
    ((8, 12), {'fraction': 0.3}, 'fraction=0.3 of 8'),
  ],
)
def test_leaves_that_do_not_fit_are_refused_by_name(shape, arguments, message):
  with pytest.raises(ValueError, match=message):
    poet(optax.adam(1e-3), **arguments).init({'bias': jnp.zeros(shape)})
