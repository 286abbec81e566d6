"""What a compiled program computes and moves between devices, from its text.

Read the text that XLA's partitioner wrote, before the passes of a backend: its
shapes are those of one device, and dtypes are the program's own. (The CPU
backend later turns bfloat16 into float32, which would double the bytes.)

Wire bytes are what each device sends in a ring of n devices, with S the bytes
of the whole array that the group holds or makes:

  all-reduce                       2 (n - 1)/n S
  all-gather, reduce-scatter         (n - 1)/n S
  all-to-all                         (n - 1)/n of the device's own array
  collective-permute                           the device's own array

An all-reduce whose every user keeps 1/n of it counts as a reduce-scatter: the
partitioner writes the former, XLA's GPU compiler then makes the latter of it.
Whatever is inside a loop counts as often as the loop turns.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import math
import re
from typing import NamedTuple

import numpy as np

_BYTES = {
  **{'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 's32': 4, 'u32': 4},
  **{'s64': 8, 'u64': 8, 'f16': 2, 'bf16': 2, 'f32': 4, 'f64': 8, 'token': 0},
}
_COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-permute',
  'reduce-scatter',
)
_HEADER = re.compile(r'^(ENTRY )?%([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%([\w.\-]+) = (.*)$')
_NAME = re.compile(r'%([\w.\-]+)')
_SHAPE = re.compile(r'\b([a-z]+[0-9]*)\[([\d,]*)\]')
_CALLED = re.compile(
  r'\b(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)'
  r'|branch_computations=\{([^}]*)\}'
)
_EXPLICIT = re.compile(r'\{\{([\d,{}]*)\}\}')
_IOTA = re.compile(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(
  r'mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?'
  r' \{([^}]*)\}'
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class Instruction(NamedTuple):
  """One line of HLO.

  Attributes:
    name: without the percent sign.
    shape: the result's type as written, layouts and all.
    opcode: 'dot', 'while', ...
    operands: names.
    attributes: the rest of the line.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str


class Collective(NamedTuple):
  """A transfer between devices.

  Attributes:
    kind: 'all-gather', 'all-reduce', 'all-to-all', 'collective-permute' or
      'reduce-scatter', as counted (see the module).
    axes: names of the mesh axes that a group spans, in mesh order.
    groups: `[groups, n]`, positions in the flattened mesh; pairs of source and
      target for a permute.
    wire_bytes: that a device sends each time.
    times: how often a run of the program does it.
    operation: the line of the program that it comes from, as jax names it.
  """

  kind: str
  axes: tuple[str, ...]
  groups: np.ndarray
  wire_bytes: float
  times: int
  operation: str


class Product(NamedTuple):
  """A matrix product on one device.

  Attributes:
    dtype: of its factors, as HLO names it: 'bf16', 'f32'.
    precision: 'default', 'high' or 'highest', as `jax.lax.Precision`.
    flops: each time; a multiplication and an addition are two.
    times: how often a run of the program does it.
    operation: the line of the program that it comes from, as jax names it.
  """

  dtype: str
  precision: str
  flops: float
  times: int
  operation: str


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
  """Every transfer of a program between the devices of a mesh.

  Args:
    text: of an HLO module for one partition per device.
    mesh: sizes of the axes, the outermost first.

  Raises:
    ValueError: the text has loops or groups that cannot be read, transfers
      split into start and end, or is for another number of devices.

  Example, on a mesh of data=2, tensor=4:
    %a = f32[8,6] all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], ...
    -> all-gather over ('tensor',), 3/4 of 192 bytes
  """
  module = _Module(text)
  count = math.prod(mesh.values())
  found = []
  for each, times in module.executed():
    if each.opcode.removesuffix('-start') not in _COLLECTIVES:
      continue
    if each.opcode.endswith('-start'):
      raise ValueError(
        f'{each.opcode} is of a scheduled program: give the text that the'
        ' partitioner wrote'
      )
    groups = _groups(each, count)
    if groups.max(initial=0) >= count:
      raise ValueError(
        f'{each.name} is between more than {count} devices: give the mesh that'
        ' the program was compiled for'
      )
    axes = _axes(groups, mesh)
    if axes:
      kind, sent = module.wire(each, groups.shape[1])
      line = _operation(each)
      found.append(Collective(kind, axes, groups, sent, times, line))
  return found


def products(text: str) -> list[Product]:
  """Every matrix product that one device computes.

  Args:
    text: of an HLO module.

  Example:
    %c = bf16[2,4] dot(%a, %b), lhs_contracting_dims={1}, ... with bf16[2,8] %a
    -> 2 x 8 x 8 = 128 operations in 'bf16', at precision 'default'
  """
  module = _Module(text)
  found = []
  for instruction, times in module.executed():
    if instruction.opcode != 'dot':
      continue
    left = module.shapes[instruction.operands[0]]
    ((dtype, dims),) = _arrays(left)
    contracted = re.search(
      r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes
    )
    summed = math.prod(dims[i] for i in _integers(contracted[1]))
    ((_, result),) = _arrays(instruction.shape)
    flops = 2.0 * math.prod(result) * summed
    precision = re.search(r'operand_precision=\{(\w+)', instruction.attributes)
    found.append(
      Product(
        dtype,
        precision[1] if precision else 'default',
        flops,
        times,
        _operation(instruction),
      )
    )
  return found


def lengthened(
  collective: Collective, mesh: Mapping[str, int], axis: str, factor: int
) -> Collective:
  """The same transfer on a mesh whose `axis` is `factor` times as long.

  Every device keeps what it has: an all-gather along all of the axis makes
  more, other transfers are of the same array among more devices. The groups
  stay those of the shorter mesh, and those along a part of the axis as short.
  """
  members = np.unravel_index(collective.groups[0], tuple(mesh.values()))
  along = dict(zip(mesh, members, strict=True))[axis]
  partial = len(set(along.tolist())) < mesh[axis]
  if partial or mesh[axis] == 1 or collective.kind == 'collective-permute':
    return collective
  before = collective.groups.shape[1]
  after = before * factor
  more = (after - 1) / (before - 1)
  if collective.kind != 'all-gather':
    more *= before / after
  return collective._replace(wire_bytes=collective.wire_bytes * more)


class _Module:
  """The computations of an HLO module."""

  def __init__(self, text: str):
    self._computations: dict[str, list[Instruction]] = {}
    self._entry = ''
    current = None
    for line in text.splitlines():
      if match := _HEADER.match(line):
        current = self._computations.setdefault(match[2], [])
        if match[1]:
          self._entry = match[2]
      elif current is not None and (match := _INSTRUCTION.match(line)):
        current.append(_instruction(match[1], match[2]))
    if not self._entry:
      raise ValueError('no ENTRY computation: this is no text of an HLO module')
    self._users: dict[str, list[Instruction]] = {}
    self.shapes: dict[str, str] = {}
    for instructions in self._computations.values():
      for each in instructions:
        self.shapes[each.name] = each.shape
        for name in each.operands:
          self._users.setdefault(name, []).append(each)

  def executed(self) -> Iterator[tuple[Instruction, int]]:
    """Instructions and how often they run; every branch counts as taken."""
    todo = [(self._entry, 1)]
    while todo:
      name, times = todo.pop()
      for each in self._computations[name]:
        yield each, times
        if each.opcode == 'while':
          body = re.search(r'\bbody=%([\w.\-]+)', each.attributes)[1]
          todo.append((body, times * self._turns(each)))
        for one, several in _CALLED.findall(each.attributes):
          todo += [
            (n, times) for n in [one] * bool(one) + _NAME.findall(several)
          ]

  def wire(self, instruction: Instruction, size: int) -> tuple[str, float]:
    """Kind as counted and bytes sent by a device in a group of `size`."""
    result = _num_bytes(instruction.shape)
    share = (size - 1) / size
    match instruction.opcode:
      case 'all-gather' | 'all-to-all':
        return instruction.opcode, share * result
      case 'reduce-scatter':
        return 'reduce-scatter', share * size * result
      case 'collective-permute':
        return 'collective-permute', float(result)
    users = self._users.get(instruction.name, [])
    if users and all(
      user.opcode == 'dynamic-slice' and _num_bytes(user.shape) * size == result
      for user in users
    ):
      return 'reduce-scatter', share * result
    return 'all-reduce', 2 * share * result

  def _turns(self, loop: Instruction) -> int:
    """How often a loop turns: as the compiler noted, or as its bound says.

    jax's loops of a known length count from 0 in steps of 1.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
      return int(known[1])
    condition = re.search(r'\bcondition=%([\w.\-]+)', loop.attributes)[1]
    last = self._computations[condition][-1]
    lines = {each.name: each for each in self._computations[condition]}
    if last.opcode == 'compare' and 'direction=LT' in last.attributes:
      bound = lines.get(last.operands[1])
      if bound is not None and bound.opcode == 'constant':
        return int(bound.attributes)
    raise ValueError(f'the length of loop {loop.name} cannot be read')


def _instruction(name: str, rest: str) -> Instruction:
  """Splits 'SHAPE opcode(OPERANDS), ATTRIBUTES'; a constant's value is one."""
  end = _closing(rest) if rest.startswith('(') else rest.index(' ')
  shape, rest = rest[:end], rest[end:].strip()
  opcode, _, rest = rest.partition('(')
  end = _closing('(' + rest) - 1
  operands, attributes = rest[: end - 1], rest[end:]
  if opcode == 'constant':
    return Instruction(name, shape, opcode, (), operands)
  return Instruction(
    name, shape, opcode, tuple(_NAME.findall(operands)), attributes
  )


def _closing(text: str) -> int:
  """Just behind the parenthesis that closes the first: '(a, (b)) c' -> 8."""
  depth = 0
  for match in re.finditer(r'[()]', text):
    depth += 1 if match[0] == '(' else -1
    if depth == 0:
      return match.end()
  raise ValueError(f'unbalanced parentheses in {text[:80]!r}')


def _groups(instruction: Instruction, count: int) -> np.ndarray:
  """`[groups, n]` positions in the mesh, of an operation over `count` devices.

  Operations that name replicas (`channel_id` without `use_global_device_ids`)
  are among all partitions of these; jax makes one replica.
  """
  attributes = instruction.attributes
  if instruction.opcode == 'collective-permute':
    pairs = re.search(r'source_target_pairs=\{([\d,{}]*)\}', attributes)[1]
    return np.reshape(_integers(re.sub('[{}]', '', pairs)), (-1, 2))
  everyone = np.arange(count)[None]
  if 'channel_id=' not in attributes:
    return everyone.T  # among replicas, each alone
  is_global = 'use_global_device_ids=true' in attributes
  if instruction.opcode != 'all-to-all' and not is_global:
    return everyone
  written = attributes.partition('replica_groups=')[2]
  if match := _IOTA.match(written):
    order = _iota(_integers(match[2]), _integers(match[3] or ''))
    return order.reshape(_integers(match[1]))
  if match := _MESH.match(written):
    return _mesh_groups(match)
  if written.startswith('{}'):
    return everyone
  if match := _EXPLICIT.match(written):
    return np.array([_integers(each) for each in match[1].split('},{')])
  raise ValueError(f'the groups of {instruction.name} cannot be read')


def _mesh_groups(match: re.Match) -> np.ndarray:
  """Groups along some axes of a mesh that XLA itself named.

  Example: mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'} names the mesh
  [[0, 4], [1, 5], [2, 6], [3, 7]] and the groups [0, 1, 2, 3], [4, 5, 6, 7].
  {'a':(2)2} would be the second half of an axis that is split into 2 x 2.
  """
  sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match[1])}
  grouped = dict.fromkeys(sizes, (1, 0))
  for name, before, size in _GROUP_AXIS.findall(match[4]):
    grouped[name] = int(before or 1), int(size or sizes[name])
  shape, along = [], []
  for name, (before, size) in grouped.items():
    if size:
      along.append(len(shape) + 1)
      shape += [before, size, sizes[name] // before // size]
    else:
      shape.append(sizes[name])
  dims = _integers(match[2] or '') or [math.prod(sizes.values())]
  order = _iota(dims, _integers(match[3] or '')).reshape(shape)
  last = range(order.ndim - len(along), order.ndim)
  size = math.prod(shape[axis] for axis in along)
  return np.moveaxis(order, along, last).reshape(-1, size)


def _iota(dims: list[int], permutation: list[int]) -> np.ndarray:
  """`0, 1, ...` in the shape `dims`, its axes permuted."""
  order = np.arange(math.prod(dims)).reshape(dims)
  return order.transpose(permutation) if permutation else order


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Axes along which the members of a group differ."""
  places = np.unravel_index(groups, tuple(mesh.values()))
  return tuple(
    name
    for name, place in zip(mesh, places, strict=True)
    if (place != place[:, :1]).any()
  )


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
  """Dtype and dims of each array of a type, which may be a tuple."""
  return [(d, _integers(dims)) for d, dims in _SHAPE.findall(shape)]


def _num_bytes(shape: str) -> int:
  return sum(_BYTES[d] * math.prod(dims) for d, dims in _arrays(shape))


def _integers(text: str) -> list[int]:
  return [int(each) for each in text.split(',') if each]


def _operation(of: Instruction) -> str:
  match = re.search(r'op_name="([^"]*)"', of.attributes)
  return match[1] if match else of.name
