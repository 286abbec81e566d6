"""What a POET update moves between devices, counted in the compiled program."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from jaxllm import poet

_SHAPES = {'up': (3, 128, 256), 'down': (3, 256, 128)}
_SPECS = {
  'up': PartitionSpec(None, 'rows', 'columns'),
  'down': PartitionSpec(None, 'columns', 'rows'),
}
_LAYER_BYTES = 128 * 256 * 4
_COLLECTIVE = re.compile(
  r'= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute'
  r'|reduce-scatter)(?:-start)?\('
)


def _collective_bytes(program: str) -> list[int]:
  """Bytes of every collective's result in HLO text.

  Example:
    '%a = (f32[2,3]{1,0}, s32[]) all-reduce(...)' -> [28]
  """
  found = []
  for line in program.splitlines():
    if match := _COLLECTIVE.search(line):
      shapes = re.findall(r'\b[fsu]32\[([\d,]*)\]', match[1])
      sizes = [math.prod(map(int, filter(None, s.split(',')))) for s in shapes]
      found.append(4 * sum(sizes))
  return found


def _placed(path, leaf, mesh: Mesh):
  """The leaf with the sharding of the weight that it belongs to."""
  name = jax.tree_util.keystr(path)
  _, rows, columns = _SPECS['up' if "'up'" in name else 'down']
  spec = PartitionSpec()
  if name.endswith('left'):
    spec = PartitionSpec(None, rows)
  elif name.endswith('right'):
    spec = PartitionSpec(None, columns)
  elif leaf.ndim == 3:
    spec = PartitionSpec(None, rows, columns)
  return jax.ShapeDtypeStruct(
    leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
  )


def _update_collectives(**settings) -> list[int]:
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))
  params = {
    name: jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=NamedSharding(mesh, _SPECS[name])
    )
    for name, shape in _SHAPES.items()
  }
  tx = poet.poet(optax.adam(1e-2), block_size=8, **settings)
  state = jax.tree_util.tree_map_with_path(
    lambda path, leaf: _placed(path, leaf, mesh),
    jax.eval_shape(tx.init, params),
  )
  compiled = jax.jit(tx.update).lower(params, state, params).compile()
  return _collective_bytes(compiled.as_text())


@pytest.mark.parametrize('merge_every', [1, 3])
def test_an_update_moves_no_weight_between_devices(merge_every):
  moved = _update_collectives(
    partitions=4, merge_every=merge_every, resample_every=2
  )
  # Products with b x b blocks are summed over devices: b/n of a weight each.
  assert 0 < max(moved) < _LAYER_BYTES / 8
  assert sum(moved) < _LAYER_BYTES / 2


def test_permutations_that_cross_devices_do_move_weights():
  moved = _update_collectives(partitions=1)
  assert max(moved) >= _LAYER_BYTES
