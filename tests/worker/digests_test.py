"""Any change of an array or of metadata is noticed, in any sharding."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest

from launch.worker import digests

_MASK = 2**32 - 1


def _digest(array):
  return digests.of_arrays({'x': array})['x']['digest']


def _scramble(x):
  x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
  x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
  return x ^ (x >> 16)


def _reference(array):
  """The digest as its definition says, in Python's integers."""
  size = array.dtype.itemsize
  word = np.dtype(f'<u{min(size, 4)}')
  words = np.frombuffer(array.tobytes(), word).tolist()
  text = ''
  for factor, seed in ((0x9E3779B1, 0x27D4EB2F), (0x85EBCA77, 0x165667B1)):
    keys = (
      _scramble((i * factor + _scramble(seed)) & _MASK) for i in range(2**20)
    )
    total = sum(_scramble(k ^ w) for k, w in zip(keys, words, strict=False))
    text += f'{total & _MASK:08x}'
  return text


def _random(shape, dtype, seed=0):
  dtype = np.dtype(dtype)
  draw = np.random.default_rng(seed)
  if dtype.kind == 'b':
    return draw.integers(0, 2, shape).astype(bool)
  data = draw.bytes(int(np.prod(shape)) * dtype.itemsize)
  return np.frombuffer(data, dtype).reshape(shape)


def test_the_digest_of_every_release_is_this_one():
  arrays = {
    'int32': np.array([1, 2], np.int32),
    'float32': np.arange(6, dtype=np.float32).reshape(2, 3) / 3,
    'bfloat16': np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16),
    'int64': np.array([-1, 2**40]),
    'bool': np.array([[True, False]]),
    'scalar': np.float32(1.5),
    'empty': np.zeros([0, 3]),
  }
  found = digests.of_arrays(arrays)
  assert found['float32']['shape'] == [2, 3]
  assert {path: array['dtype'] for path, array in found.items()} == {
    path: str(array.dtype) for path, array in arrays.items()
  }
  assert {path: array['digest'] for path, array in found.items()} == {
    'int32': '569e2e0fd3ddfe60',
    'float32': 'b44f24497785e315',
    'bfloat16': '37f8b89c7f8b240a',
    'int64': '41f7f3437737330d',
    'bool': 'cee2c611f09aa475',
    'scalar': 'a64441f29bce65f5',
    'empty': '0000000000000000',
  }


@pytest.mark.parametrize(
  'dtype',
  [
    *('float32', 'float16', 'float64', 'bool', ml_dtypes.bfloat16),
    *('int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64'),
  ],
)
def test_numpy_jax_and_the_definition_agree(dtype):
  array = _random((3, 4, 5), dtype)
  with jax.enable_x64(True):
    on_device = jnp.asarray(array)
    assert on_device.dtype == array.dtype
    assert _digest(on_device) == _reference(array)
  assert _digest(array) == _reference(array)


_WHOLE = _random((16, 8, 32), np.float32)
_SPECS = [
  ((8,), P()),
  ((8,), P('a')),
  ((8,), P(None, 'a')),
  ((2, 4), P('a', None, 'b')),
  ((2, 4), P(None, 'b')),
  ((2, 4), P(('b', 'a'))),
  ((2, 2, 2), P('c', ('a', 'b'))),
  ((2, 2, 2), P('b', None, 'c')),
]


@pytest.mark.parametrize(('sizes', 'spec'), _SPECS)
def test_a_digest_does_not_depend_on_the_mesh(sizes, spec):
  mesh = Mesh(
    np.array(jax.devices()).reshape(sizes), tuple('abc')[: len(sizes)]
  )
  sharded = jax.device_put(_WHOLE, NamedSharding(mesh, spec))
  assert _digest(sharded) == _digest(_WHOLE) == _reference(_WHOLE)


def test_arrays_of_several_meshes_go_together_under_another_mesh():
  devices = np.array(jax.devices())
  meshes = (Mesh(devices[:4], 'a'), Mesh(devices[4:], 'a'), Mesh(devices, 'b'))
  arrays = {
    str(i): jax.device_put(_WHOLE, NamedSharding(mesh, P(mesh.axis_names)))
    for i, mesh in enumerate(meshes)
  }
  arrays |= {
    'host': _WHOLE,
    'third': jax.device_put(_WHOLE, devices[3]),
    'default': jnp.asarray(_WHOLE),
  }
  with jax.set_mesh(Mesh(devices.reshape(4, 2), ('x', 'y'))):
    found = digests.of_arrays(arrays)
  assert list(found) == list(arrays)
  assert {array['digest'] for array in found.values()} == {_digest(_WHOLE)}


@pytest.mark.parametrize('dtype', ['float32', ml_dtypes.bfloat16, 'int8'])
def test_every_flipped_bit_changes_both_lanes(dtype):
  array = _random((2, 3), dtype)
  digest = _digest(array)
  for place, bit in itertools.product(range(6), range(8 * array.itemsize)):
    bits = np.frombuffer(array.tobytes(), f'u{array.itemsize}').copy()
    bits[place] ^= 1 << bit
    other = _digest(bits.view(array.dtype).reshape(2, 3))
    assert other[:8] != digest[:8]
    assert other[8:] != digest[8:]


def test_every_two_swapped_elements_change_it():
  array = np.arange(12, dtype=np.int32).reshape(3, 4)
  found = {_digest(array)}
  for pair in itertools.combinations(range(12), 2):
    swapped = array.reshape(-1).copy()
    swapped[list(pair)] = swapped[list(pair[::-1])]
    found.add(_digest(swapped.reshape(3, 4)))
  assert len(found) == 1 + 66


@pytest.mark.parametrize(
  'shape', [(2, 2**31, 3), (2**20, 2**20), (5, 2**29, 2, 4), (7, 6, 5), ()]
)
def test_places_differ_in_large_arrays(shape):
  for half in zip(*digests._steps(shape), strict=True):
    # Counted in mixed radix: each step is beyond all that lie below it.
    below = 0
    for step, size in sorted(zip(half, shape, strict=True)):
      assert step == 0 or step > below
      below += step * (size - 1)
    assert below < 2**32


def test_it_takes_no_memory_and_one_all_reduce():
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('a', 'b'))
  specs = (P(None, 'b', 'a'), P('b'), P())
  shapes = [
    jax.ShapeDtypeStruct(
      (8, 1024, 2048), dtype, sharding=NamedSharding(mesh, spec)
    )
    for spec, dtype in zip(specs, ('float32', 'bfloat16', 'int8'), strict=True)
  ]
  with jax.set_mesh(mesh):
    compiled = digests._program(mesh, specs).lower(*shapes).compile()
  analysis = compiled.memory_analysis()
  assert analysis.argument_size_in_bytes > 2**24
  assert analysis.temp_size_in_bytes < 2**16
  collectives = re.findall(
    r' (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(',
    compiled.as_text(),
  )
  assert collectives == ['all-reduce']


def test_a_changed_array_is_named():
  arrays = {'x': _WHOLE, 'y': np.arange(3)}
  recorded = digests.of_arrays(arrays)
  digests.verify(arrays, recorded)
  digests.verify({'y': arrays['y']}, recorded)
  for other in (np.array([0, 1, 3]), np.arange(3).astype(np.uint64)):
    with pytest.raises(digests.MismatchError, match='y differs from its'):
      digests.verify({**arrays, 'y': other}, recorded)


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


def test_digests_of_an_older_version_are_named():
  content = {'digests': {'x': {'dtype': 'int8', 'shape': [], 'regions': {}}}}
  sealed = {**content, 'seal': digests._of_json(content)}
  with pytest.raises(digests.MismatchError, match='of an older version'):
    digests.unseal(sealed)
