"""How arrays lie on a mesh of devices.

The mesh has three axes. `data`: copies of the model share out the rows of a
batch. `fsdp`: so do these, and each keeps a part of every matrix, gathered when
its layer computes. `tensor`: heads and features are shared out, and activations
are summed where a product has all of them.

Every parameter's place is named by one table of paths; what an optimizer keeps
for a parameter lies where the parameter does, POET's skew coordinates and their
moments with the rows or columns that they turn.
"""

import dataclasses
import math
import re
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

AXES = ('data', 'fsdp', 'tensor')
# The rows of a batch, and of activations [B, L, D].
ROWS = PartitionSpec(('data', 'fsdp'))

# (pattern of a parameter's whole path, its spec); `layers` are stacked on axis
# 0. The first match wins, none is an error.
PARAMETERS = (
  (r'embed/embedding', PartitionSpec('tensor', 'fsdp')),
  (r'lm_head/kernel', PartitionSpec('fsdp', 'tensor')),
  (
    r'layers/(attention/[qkv]|mlp/(gate|up))_proj/kernel',
    PartitionSpec(None, 'fsdp', 'tensor'),
  ),
  (
    r'layers/(attention/o|mlp/down)_proj/kernel',
    PartitionSpec(None, 'tensor', 'fsdp'),
  ),
  (
    r'layers/(attention/[qkv]|mlp/(gate|up))_proj/bias',
    PartitionSpec(None, 'tensor'),
  ),
  (r'layers/(attention/o|mlp/down)_proj/bias', PartitionSpec(None, None)),
  (r'layers/\w+_norm/scale', PartitionSpec(None, None)),
  (r'final_norm/scale', PartitionSpec(None)),
)
_PARAMETER = re.compile(r'(?:^|/)((?:embed|lm_head|layers|final_norm)/.*)$')
# What an optimizer keeps of one parameter under its path: the axis of the
# parameter (from the end) that it lies along, or None.
_PARTS = {'left': -2, 'right': -1, 'weight': None, 'base': None}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; one of them may be -1, for all that are left.

  Attributes:
    data: copies of the model.
    fsdp: parts of every matrix and of the batch.
    tensor: parts of heads, features and vocabulary.
  """

  data: int
  fsdp: int
  tensor: int

  def __post_init__(self):
    sizes = dataclasses.astuple(self)
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
      raise ValueError(
        f'mesh {_written(sizes)}: give each axis 1 or more devices, and at most'
        ' one of them -1 for all that are left'
      )


def make_mesh(config: MeshConfig, devices: list[jax.Device]) -> Mesh:
  """The mesh over these devices, neighbours along `tensor` first.

  Raises:
    ValueError: the axes do not multiply to the number of devices.
  """
  sizes = list(dataclasses.astuple(config))
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and len(devices) % known == 0:
    sizes[sizes.index(-1)] = len(devices) // known
  if math.prod(sizes) != len(devices):
    raise ValueError(
      f'mesh {_written(sizes)} does not fit {len(devices)} devices: let the'
      ' axes multiply to that number, or set one of them to -1'
    )
  return Mesh(np.array(devices).reshape(sizes), AXES)


def state_shardings(state: Any, mesh: Mesh) -> Any:
  """Tree of shardings of a `TrainState`, or of any part of one.

  Args:
    state: arrays or their shapes.
    mesh: with the axes `AXES`.

  Raises:
    ValueError: a leaf belongs to no parameter and is no scalar or key, or the
      mesh does not divide one of its dims.
  """

  def place(path, leaf) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    spec = _spec(name, leaf.ndim)
    for dim, axes in zip(leaf.shape, spec, strict=False):
      parts = math.prod(mesh.shape[axis] for axis in _names(axes))
      if dim % parts:
        raise ValueError(
          f'mesh {_written(mesh.shape.values())}: {name} of shape'
          f' {leaf.shape} cannot be split into {parts} along its axis of'
          f' {dim}: choose a mesh whose axes divide it'
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Of every array `[B, L]` of a batch: rows are shared out."""
  return NamedSharding(mesh, ROWS)


def check_batch(rows: int, mesh: Mesh, where: str) -> None:
  """Refuses a number of rows that the mesh cannot share out evenly."""
  parts = mesh.shape['data'] * mesh.shape['fsdp']
  if rows % parts:
    raise ValueError(
      f'{where}={rows} rows do not share out over data x fsdp = {parts}: choose'
      ' a multiple, or another mesh'
    )


def check_partitions(partitions: int, mesh: Mesh) -> None:
  """Refuses POET permutations that would cross from device to device."""
  parts = math.lcm(mesh.shape['fsdp'], mesh.shape['tensor'])
  if partitions % parts:
    raise ValueError(
      f'optimizer.poet.partitions={partitions} must be a multiple of mesh.fsdp='
      f'{mesh.shape["fsdp"]} and mesh.tensor={mesh.shape["tensor"]}, so that'
      f' rows stay on their devices: set it to {parts}'
    )


def constrain_rows(x: Array) -> Array:
  """Shares out axis 0 as a batch's rows, where a mesh is set."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, ROWS)


def _spec(name: str, ndim: int) -> PartitionSpec:
  """Spec of the leaf with this path in a training state."""
  match = _PARAMETER.search(name)
  if match is None:
    if ndim == 0 or name == 'key':
      return PartitionSpec()
    raise ValueError(f'{name} belongs to no parameter: add it to PARAMETERS')
  path, part = match[1], None
  if path.rpartition('/')[2] in _PARTS:
    path, _, part = path.rpartition('/')
  found = [spec for p, spec in PARAMETERS if re.fullmatch(p, path)]
  if not found:
    raise ValueError(f'no place for {path}: add it to PARAMETERS')
  spec = found[0]
  if part is None:
    return spec
  stack = spec[:-2]
  axis = _PARTS[part]
  return PartitionSpec(*stack, *(() if axis is None else (spec[axis],)))


def _names(axes: Any) -> tuple[str, ...]:
  if axes is None:
    return ()
  return (axes,) if isinstance(axes, str) else axes


def _written(sizes: Any) -> str:
  """`data=2, fsdp=4, tensor=1`."""
  return ', '.join(f'{a}={n}' for a, n in zip(AXES, sizes, strict=True))
