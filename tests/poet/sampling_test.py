"""Permutations: inside their partition, per layer, from seed and merge."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.poet import sampling


def _draw(shapes, *, seed=0, merges=0, partitions=1):
  return sampling.draw(seed, merges, shapes, partitions)


def test_permutations_stay_inside_their_partition_and_differ_by_layer():
  (side,) = _draw([(3, 24)], partitions=4)
  chex.assert_shape(side, (3, 24))
  groups = np.sort(np.asarray(side.order).reshape(3, 4, 6), axis=-1)
  expected = np.broadcast_to(np.arange(24).reshape(4, 6), (3, 4, 6))
  np.testing.assert_array_equal(groups, expected)
  assert len({tuple(row.tolist()) for row in side.order}) == 3


def test_every_place_is_equally_likely():
  (side,) = _draw([(4000, 5)])
  counts = np.stack([(side.order == i).sum(axis=0) for i in range(5)])
  # 800 expected in each of 25 cells, standard deviation 25.
  assert np.abs(counts - 800).max() < 5 * 25


@pytest.mark.parametrize('partitions', [1, 2])
def test_inverse_undoes_permute(partitions):
  rows, columns = sampling.draw(0, jnp.int32(0), [(6,), (4,)], partitions)
  x = jnp.arange(6 * 4.0).reshape(6, 4)
  there = sampling.permute(x, rows.order, columns.order, partitions)
  back = sampling.permute(there, rows.inverse, columns.inverse, partitions)
  chex.assert_trees_all_equal(back, x)
  chex.assert_trees_all_equal(there, x[rows.order][:, columns.order])
  assert float(jnp.abs(there - x).max()) > 0


def test_draws_depend_on_leaf_side_merge_and_seed():
  shapes = [(64,), (64,), (2, 64)]
  draws = [*_draw(shapes), *_draw(shapes, seed=1), *_draw(shapes, merges=1)]
  rows = np.concatenate([np.reshape(d.order, (-1, 64)) for d in draws])
  assert len({tuple(row) for row in rows.tolist()}) == 12
  again = _draw(shapes)
  chex.assert_trees_all_equal(again, _draw(shapes))
