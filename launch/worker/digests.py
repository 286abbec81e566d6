"""Digests of arrays and their metadata, to notice any change on the disk.

An array is digested per region, as its shards lie on the devices, so that no
more than one shard of one array is on the host at a time.
"""

from collections.abc import Mapping
import json
from typing import Any

import jax
import numpy as np
import xxhash

# By path: {'dtype': 'float32', 'shape': [4, 2], 'regions': {'0:4,0:2': hex}}.
Arrays = dict[str, dict[str, Any]]


class MismatchError(Exception):
  """Content is not what was written."""


def seal(metadata: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
  """JSON that carries metadata, digests of arrays, and a digest of itself.

  Args:
    metadata: JSON values; not the names `digests` and `seal`.
    arrays: jax or numpy arrays by path.
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
  return content, arrays


def of_arrays(arrays: Mapping[str, Any]) -> Arrays:
  """Digests of jax or numpy arrays by path."""
  return {
    path: {
      'dtype': str(array.dtype),
      'shape': list(array.shape),
      'regions': {
        _key(index, array.shape): _of_region(data)
        for index, data in _shards(array)
      },
    }
    for path, array in arrays.items()
  }


def verify(arrays: Mapping[str, Any], recorded: Arrays) -> None:
  """Compares arrays, however sharded now, with recorded digests.

  Raises:
    MismatchError: an array differs.
  """
  for path, array in arrays.items():
    digests = dict(recorded[path]['regions'])
    unmatched = {}
    for index, data in _shards(array):
      key = _key(index, array.shape)
      if key in digests:
        if _of_region(data) != digests.pop(key):
          raise MismatchError(f'{path} differs from its digest')
      else:
        unmatched[key] = data
      del data
    if digests:
      whole = _whole(array)
      for key, digest in digests.items():
        if _of_region(whole[_slices(key)]) != digest:
          raise MismatchError(f'{path} differs from its digest')


def _shards(array: Any):
  """Yields index and host data of each distinct shard."""
  if isinstance(array, np.ndarray | np.generic):
    yield tuple(slice(0, size) for size in array.shape), array
    return
  assert array.is_fully_addressable, 'an array spans several processes'
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      yield shard.index, np.asarray(shard.data)


def _whole(array: jax.Array) -> np.ndarray:
  whole = np.empty(array.shape, array.dtype)
  for index, data in _shards(array):
    whole[index] = data
  return whole


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
  """`(slice(0, 4), slice(None))` of shape `(8, 2)` is '0:4,0:2'."""
  bounds = [
    part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
  ]
  return ','.join(f'{start}:{stop}' for start, stop in bounds)


def _slices(key: str) -> tuple[slice, ...]:
  return tuple(
    slice(*map(int, part.split(':'))) for part in key.split(',') if part
  )


def _of_region(data: np.ndarray) -> str:
  hasher = xxhash.xxh3_128(f'{data.dtype}{list(data.shape)}'.encode())
  hasher.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
  return hasher.hexdigest()


def _of_json(content: Any) -> str:
  # Through JSON once, so that it is digested as it will be read.
  text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
  return xxhash.xxh3_128_hexdigest(text.encode())
