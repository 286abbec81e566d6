"""Any change of an array or of metadata is noticed, in any sharding."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from launch.worker import digests


def _digest(array):
  (digest,) = digests.of_arrays({'x': array})['x']['regions'].values()
  return digest


def test_a_digest_depends_on_bytes_dtype_and_shape():
  array = np.arange(6, dtype=np.int32).reshape(2, 3)
  same = (jnp.asarray(array), np.asfortranarray(array))
  other = (
    array + np.eye(2, 3, dtype=np.int32),
    array.reshape(3, 2),
    array.view(np.uint32),
    -0.0 * array.astype(np.float32),
    0.0 * array.astype(np.float32),
  )
  assert {_digest(x) for x in same} == {_digest(array)}
  assert len({_digest(x) for x in (array, *other)}) == 6


@pytest.mark.parametrize(
  'array',
  [
    jnp.zeros([]),
    jnp.zeros([0, 3]),
    jnp.ones(3, bool),
    jnp.ones(3, jnp.bfloat16),
  ],
)
def test_any_shape_and_dtype_has_a_digest(array):
  digests.verify({'x': array}, digests.of_arrays({'x': array}))


def test_each_shard_has_its_region_once():
  mesh = jax.make_mesh(
    (2, 4), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  array = jnp.arange(16.0).reshape(4, 4)
  sharded = jax.device_put(array, NamedSharding(mesh, P('a', None)))
  recorded = digests.of_arrays({'x': sharded})
  assert set(recorded['x']['regions']) == {'0:2,0:4', '2:4,0:4'}
  for spec in (P('a', 'b'), P('b'), P()):
    again = jax.device_put(array, NamedSharding(mesh, spec))
    digests.verify({'x': again}, recorded)
    changed = again.at[3, 1].add(1)
    with pytest.raises(digests.MismatchError, match='x differs'):
      digests.verify({'x': changed}, recorded)


def test_a_digested_array_can_still_be_donated():
  array = jnp.arange(1 << 16, dtype=jnp.float32)
  digests.verify({'x': array}, digests.of_arrays({'x': array}))
  place = array.unsafe_buffer_pointer()
  out = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
  # A live view on the host would have forced a copy.
  assert out.unsafe_buffer_pointer() == place


def test_metadata_comes_back_without_its_digests():
  metadata = {'position': 7, 'rate': 0.1, 'names': ('a', 'b'), 'none': None}
  arrays = {'x': np.arange(3)}
  sealed = json.loads(json.dumps(digests.seal(metadata, arrays)))
  content, recorded = digests.unseal(sealed)
  assert content == {**metadata, 'names': ['a', 'b']}
  assert recorded == digests.of_arrays(arrays)


@pytest.mark.parametrize('name', ['position', 'digests', 'seal', 'more'])
def test_changed_metadata_is_noticed(name):
  sealed = digests.seal({'position': 7}, {'x': np.arange(3)})
  with pytest.raises(digests.MismatchError):
    digests.unseal({**sealed, name: 8})


@pytest.mark.parametrize('content', [{}, [], 3, {'digests': {}}])
def test_what_was_not_sealed_is_refused(content):
  with pytest.raises(digests.MismatchError, match='has no digests'):
    digests.unseal(content)
