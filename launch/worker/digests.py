"""Digests of arrays and their metadata, to notice any change on the disk.

The digest of an array depends on its elements, not on where they lie: every
mesh, any number of processes and every kind of device gives the same one. It is
a sum over the elements, modulo 2**32, of a number mixed from an element's place
and its bits; each device sums over its own shards, and one all-reduce adds the
sums of all arrays. Two such sums (lanes) make 64 bits.

A change of a single element of up to 32 bits always changes both lanes, since
the mix is a bijection of the bits. Any other accident, as when elements change
places or a block becomes zeros, escapes with a probability of about 2**-64. It
is no protection against somebody who looks for a collision.

Example: `of_arrays({'x': np.array([1, 2], np.int32)})` is
`{'x': {'dtype': 'int32', 'shape': [2], 'digest': '569e2e0fd3ddfe60'}}`.
"""

from collections.abc import Mapping
import functools
import json
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import xxhash

# By path: {'dtype': 'float32', 'shape': [4, 2], 'digest': 16 hex digits}.
Arrays = dict[str, dict[str, Any]]

# (odd factor of the place, seed), one pair per lane.
_LANES = ((0x9E3779B1, 0x27D4EB2F), (0x85EBCA77, 0x165667B1))

# Elements of a shard that is small: their places are constants in the program.
_SMALL = 4096


class MismatchError(Exception):
  """Content is not what was written."""


def seal(metadata: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
  """JSON that carries metadata, digests of arrays, and a digest of itself.

  Args:
    metadata: JSON values; not the names `digests` and `seal`.
    arrays: as `of_arrays` takes them.
  """
  assert not {'digests', 'seal'} & set(metadata), sorted(metadata)
  content = {**metadata, 'digests': of_arrays(arrays)}
  return {**content, 'seal': _of_json(content)}


def unseal(sealed: Any) -> tuple[dict[str, Any], Arrays]:
  """The metadata and the digests of arrays that `seal` was given.

  Raises:
    MismatchError: it is not what `seal` returned.
  """
  if not isinstance(sealed, dict) or not {'digests', 'seal'} <= set(sealed):
    raise MismatchError('metadata has no digests')
  content = {name: sealed[name] for name in sealed if name != 'seal'}
  if _of_json(content) != sealed['seal']:
    raise MismatchError('metadata differs from its digest')
  arrays = content.pop('digests')
  if not all('digest' in array for array in arrays.values()):
    raise MismatchError('its digests are those of an older version')
  return content, arrays


def of_arrays(arrays: Mapping[str, Any]) -> Arrays:
  """Digests of arrays by path.

  With several processes, all of them call this with the same paths.

  Args:
    arrays: jax arrays with a `NamedSharding` or on one device, or numpy arrays;
      of floats, integers and booleans of 8 to 64 bits.
  """
  groups = {}
  for path, array in arrays.items():
    place = _sharding(array)
    groups.setdefault(place.mesh, {})[path] = place.spec
  digests = {}
  for mesh, specs in groups.items():
    program = _program(mesh, tuple(specs.values()))
    with jax.set_mesh(mesh):
      lanes = program(*(_readable(arrays[path]) for path in specs))
    for path, (first, second) in zip(specs, np.asarray(lanes), strict=True):
      digests[path] = f'{first:08x}{second:08x}'
  return {
    path: {
      'dtype': str(array.dtype),
      'shape': list(array.shape),
      'digest': digests[path],
    }
    for path, array in arrays.items()
  }


def verify(arrays: Mapping[str, Any], recorded: Arrays) -> None:
  """Compares arrays with recorded digests, on all processes alike.

  Raises:
    MismatchError: an array differs.
  """
  for path, array in of_arrays(arrays).items():
    if array != recorded[path]:
      raise MismatchError(f'{path} differs from its digest')


def _sharding(array: Any) -> NamedSharding:
  if not isinstance(array, jax.Array):
    device = jax.local_devices()[0]
  elif isinstance(array.sharding, NamedSharding):
    return array.sharding
  else:
    (device,) = array.sharding.device_set
  return NamedSharding(Mesh(np.array([device]), ('device',)), PartitionSpec())


def _readable(array: Any) -> Any:
  """Numpy arrays as the unsigned integers that jax keeps as they are."""
  if isinstance(array, jax.Array):
    return array
  size = array.dtype.itemsize
  unsigned = np.dtype(f'uint{8 * min(size, 4)}')
  words = np.ascontiguousarray(array).reshape(-1).view(unsigned)
  return words.reshape((*array.shape, *([size // 4] if size > 4 else [])))


@functools.lru_cache(maxsize=16)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
  """Jitted: arrays so sharded -> both lanes of each, `[arrays, 2]` uint32."""
  return jax.jit(
    jax.shard_map(
      functools.partial(_lanes, mesh, specs),
      mesh=mesh,
      in_specs=specs,
      out_specs=PartitionSpec(),
      check_vma=False,
    )
  )


def _lanes(
  mesh: Mesh, specs: tuple[PartitionSpec, ...], *shards: Array
) -> Array:
  """On each device: sums over its shards, then over all devices."""
  bits = [_bits(shard) for shard in shards]
  layouts = [
    _layout(mesh, spec, part.shape)
    for spec, part in zip(specs, bits, strict=True)
  ]
  index = jnp.stack([lax.axis_index(axis) for axis in mesh.axis_names])
  index = index.astype(jnp.uint32)[None]
  # Per array: the place of the shard's first element, and of devices that have
  # the same shard, how far this one is from the first, which alone counts.
  low, high, copy = (
    (np.array(table, np.uint32) * index).sum(axis=1, dtype=jnp.uint32)
    for table in zip(*(layout.by_axis for layout in layouts), strict=True)
  )
  is_small = [
    part.size <= _SMALL and not any(high for _, high in layout.steps)
    for part, layout in zip(bits, layouts, strict=True)
  ]
  small = [i for i, it_is in enumerate(is_small) if it_is]
  large = [i for i, it_is in enumerate(is_small) if not it_is]
  sums = [_of_large(layouts[i].steps, bits[i], low[i], high[i]) for i in large]
  rows = jnp.stack(sums) if large else jnp.zeros((0, 2), jnp.uint32)
  if small:
    places = [_places(layouts[i].steps, bits[i].shape) for i in small]
    of_small = _of_small(places, [bits[i] for i in small], low[np.array(small)])
    rows = jnp.concatenate([rows, of_small])
  rows = rows[np.argsort(np.array(large + small))]
  counted = jnp.where((copy == 0)[:, None], rows, jnp.uint32(0))
  return lax.psum(counted, mesh.axis_names)


class _Layout(NamedTuple):
  """How places in an array depend on indices in a shard and in the mesh.

  Attributes:
    steps: see `_steps`; of the array's axes.
    by_axis: three rows with an entry for each axis of the mesh: what a
      device's index on it adds to the low half of its first element's place, to
      the high half, and (1 or 0) to the number of its copy.
  """

  steps: tuple[tuple[int, int], ...]
  by_axis: tuple[list[int], list[int], list[int]]


def _layout(
  mesh: Mesh, spec: PartitionSpec, shard_shape: tuple[int, ...]
) -> _Layout:
  axes_of_dims = [
    (axes,) if isinstance(axes, str) else axes or () for axes in spec
  ]
  axes_of_dims += [()] * (len(shard_shape) - len(spec))
  parts = [math.prod(mesh.shape[axis] for axis in a) for a in axes_of_dims]
  steps = _steps(
    tuple(size * n for size, n in zip(shard_shape, parts, strict=True))
  )
  offsets = dict.fromkeys(mesh.axis_names, (0, 0, 1))
  for size, axes, (low, high) in zip(
    shard_shape, axes_of_dims, steps, strict=True
  ):
    for axis in reversed(axes):
      offsets[axis] = (size * low % 2**32, size * high % 2**32, 0)
      size *= mesh.shape[axis]
  low, high, copy = zip(*offsets.values(), strict=True)
  return _Layout(steps, (list(low), list(high), list(copy)))


@functools.partial(jax.jit, static_argnums=0)
def _of_large(
  steps: tuple[tuple[int, int], ...], bits: Array, low: Array, high: Array
) -> Array:
  """Both lanes of a part, `[2]`; jitted to trace each shape once."""
  for axis, (step, high_step) in enumerate(steps):
    index = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    low += index * jnp.uint32(step)
    if high_step:
      high += index * jnp.uint32(high_step)
  terms = _terms(bits, low, high)
  # Both lanes in one reduction: that much is fused into one loop everywhere.
  return jnp.stack(
    lax.reduce(
      terms,
      (jnp.uint32(0),) * len(terms),
      lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
      tuple(range(bits.ndim)),
    )
  )


def _of_small(places: list[np.ndarray], bits: list[Array], low: Array) -> Array:
  """Both lanes of many parts, `[parts, 2]`, in a single loop.

  To compile one for each would hold up the first checkpoint.
  """
  owners = np.repeat(np.arange(len(bits)), [part.size for part in bits])
  terms = _terms(
    jnp.concatenate([part.reshape(-1) for part in bits]),
    low[owners] + np.concatenate(places),
    jnp.uint32(0),
  )
  return jax.ops.segment_sum(jnp.stack(terms, axis=-1), owners, len(bits))


def _places(
  steps: tuple[tuple[int, int], ...], shape: tuple[int, ...]
) -> np.ndarray:
  """Low halves of all elements' places in a shard that begins at 0."""
  index = np.indices(shape, np.uint32)
  low_steps = np.array([low for low, _ in steps], np.uint32)
  return (index.T * low_steps).sum(axis=-1, dtype=np.uint32).T.reshape(-1)


def _bits(array: Array) -> Array:
  """Elements as uint32; those of 64 bits as two along a last axis."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.uint32)
  size = 8 * array.dtype.itemsize
  if size == 64:
    return lax.bitcast_convert_type(array, jnp.uint32)
  unsigned = jnp.dtype(f'uint{size}')
  return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _steps(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  """How far apart neighbours along each axis are, in the place's two halves.

  The last axes, of up to 2**32 elements together, count in the low half, so
  that places differ in larger arrays, too: `(2, 2**31, 3)` has
  `((0, 2**31), (0, 1), (1, 0))`.
  """
  steps, low, high = [], 1, 1
  for size in reversed(shape):
    if low * size <= 2**32 and all(step for step, _ in steps):
      steps.append((low, 0))
      low *= size
    else:
      steps.append((0, high))
      high *= size
  return tuple(steps[::-1])


def _terms(bits: Array, low: Array, high: Array) -> tuple[Array, Array]:
  """The numbers to add up in each lane, from elements' bits and places."""

  def term(factor: int, seed: int) -> Array:
    start = _scramble(high + jnp.uint32(seed))
    key = _scramble(low * jnp.uint32(factor) + start)
    return _scramble(key ^ bits)

  first, second = _LANES
  return term(*first), term(*second)


def _scramble(x: Array) -> Array:
  """The finalizer of MurmurHash3, a bijection of uint32 (Appleby, 2011)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _of_json(content: Any) -> str:
  # Through JSON once, so that it is digested as it will be read.
  text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
  return xxhash.xxh3_128_hexdigest(text.encode())
