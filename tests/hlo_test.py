"""What HLO text says about transfers and products, against counts by hand."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from jaxllm import hlo
from jaxllm import sharding

_MESH = {'data': 2, 'fsdp': 4, 'tensor': 1}
_CUBE = {'data': 2, 'fsdp': 2, 'tensor': 2}


def _module(*lines: str, others: str = '') -> str:
  """An HLO module whose entry has these lines."""
  body = '\n'.join(f'  {line}' for line in lines)
  return (
    f'HloModule step, num_partitions=8\n\n{others}\n'
    f'ENTRY %main (x: f32[2]) -> f32[2] {{\n{body}\n}}\n'
  )


def _only(line: str, mesh: dict[str, int]) -> hlo.Collective:
  (found,) = hlo.collectives(_module(line), mesh)
  return found


_GLOBAL = 'channel_id=1, use_global_device_ids=true'


@pytest.mark.parametrize(
  ('line', 'kind', 'wire_bytes'),
  [
    # Four devices make [8, 6] of float32: 3/4 of 192 bytes.
    ('%a = f32[8,6]{1,0} all-gather(%x)', 'all-gather', 144),
    # The same in bfloat16; two arrays at once.
    ('%a = (bf16[8,6]{1,0}, bf16[8]{0}) all-gather(%x, %y)', 'all-gather', 84),
    ('%a = f32[8,6]{1,0} all-reduce(%x)', 'all-reduce', 288),
    # What remains is a quarter of the array.
    ('%a = f32[2,6]{1,0} reduce-scatter(%x)', 'reduce-scatter', 144),
    ('%a = s32[4,2]{1,0:T(8,128)} all-to-all(%x)', 'all-to-all', 24),
    ('%a = pred[] all-reduce(%x)', 'all-reduce', 1.5),
  ],
)
def test_wire_bytes_are_those_of_a_ring(line, kind, wire_bytes):
  found = _only(f'{line}, {_GLOBAL}, replica_groups=[2,4]<=[8]', _MESH)
  assert found.kind == kind
  assert found.wire_bytes == wire_bytes
  assert found.axes == ('fsdp',)
  assert found.times == 1


def test_a_permute_sends_the_array_once():
  line = (
    '%a = f32[8]{0} collective-permute(%x), channel_id=1,'
    ' source_target_pairs={{0,4},{4,0},{1,5},{5,1}}'
  )
  found = _only(line, _MESH)
  assert (found.kind, found.axes) == ('collective-permute', ('data',))
  assert found.wire_bytes == 32


_FSDP = [[0, 1, 2, 3], [4, 5, 6, 7]]
_DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]
_ALL = [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
  ('groups', 'axes', 'members'),
  [
    ('{{0,1,2,3},{4,5,6,7}}', ('fsdp',), _FSDP),
    ('{{0,4},{1,5},{2,6},{3,7}}', ('data',), _DATA),
    ('{}', ('data', 'fsdp'), _ALL),
    ('[2,4]<=[8]', ('fsdp',), _FSDP),
    ('[4,2]<=[2,4]T(1,0)', ('data',), _DATA),
    ('[1,8]<=[8]', ('data', 'fsdp'), _ALL),
    ("mesh['a'=8] {'a'}", ('data', 'fsdp'), _ALL),
    ("mesh['a'=2,'b'=4] {'b'}", ('fsdp',), _FSDP),
    ("mesh['a'=2,'b'=4] {'a'}", ('data',), _DATA),
    (
      "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
      ('data',),
      _DATA,
    ),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ('fsdp',), _FSDP),
    ("mesh['a'=8] {'a':(2)4}", ('fsdp',), _FSDP),
    ("mesh['a'=8] {'a':(1)2}", ('data',), _DATA),
  ],
)
def test_groups_are_read_in_every_form(groups, axes, members):
  line = f'%a = f32[8]{{0}} all-gather(%x), {_GLOBAL}, replica_groups={groups}'
  found = _only(line + ', dimensions={0}', _MESH)
  assert found.axes == axes
  np.testing.assert_array_equal(found.groups, members)


def test_groups_of_replicas_are_groups_of_all_partitions():
  line = '%a = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0}}'
  assert _only(line, _MESH).axes == ('data', 'fsdp')
  alone = '%a = f32[8]{0} all-reduce(%x), replica_groups={{0}}'
  assert hlo.collectives(_module(alone), _MESH) == []


def test_groups_on_two_axes_of_three():
  line = f'%a = f32[8]{{0}} all-gather(%x), {_GLOBAL}, replica_groups='
  assert _only(f'{line}[2,4]<=[2,2,2]T(1,0,2)', _CUBE).axes == (
    'data',
    'tensor',
  )
  with pytest.raises(ValueError, match='more than 4 devices'):
    _only(f'{line}[1,8]<=[8]', {'data': 4})


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
  lines = [
    f'%a = f32[8,6]{{1,0}} all-reduce(%x), {_GLOBAL}, replica_groups={{}}',
    '%b = f32[1,6]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={1,6}',
  ]
  (found,) = hlo.collectives(_module(*lines), _MESH)
  assert (found.kind, found.wire_bytes) == ('reduce-scatter', 7 / 8 * 192)
  # Another user, or another part, needs all of it.
  for more in ('%c = f32[8,6]{1,0} negate(%a)', ''):
    other = lines[1] if more else lines[1].replace('1,6', '2,6')
    (found,) = hlo.collectives(_module(lines[0], other, more), _MESH)
    assert (found.kind, found.wire_bytes) == ('all-reduce', 2 * 7 / 8 * 192)


_LOOPS = f"""\
%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %a.1 = f32[8]{{0}} all-gather(%p), {_GLOBAL}, replica_groups=[2,4]<=[8]
}}

%fused (p: f32[8]) -> f32[8] {{
  %d.1 = f32[2,4]{{1,0}} parameter(0)
  %d.2 = f32[4,3]{{1,0}} parameter(1)
  ROOT %d = f32[2,3]{{1,0}} dot(%d.1, %d.2), lhs_contracting_dims={{1}}
}}

%small (p: (s32[], f32[8])) -> pred[] {{
  %c.0 = s32[] constant(3)
  %c.1 = s32[] get-tuple-element(%p), index=0
  ROOT %c = pred[] compare(%c.1, %c.0), direction=LT
}}

%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %w.1 = (s32[], f32[8]{{0}}) while(%p), condition=%small, body=%inner
  %f.1 = f32[2,3]{{1,0}} fusion(%p), kind=kLoop, calls=%fused
}}
"""
_WHILE = (
  '%w = (s32[], f32[8]{0}) while(%t), condition=%small, body=%outer,'
  ' backend_config={"known_trip_count":{"n":"5"}}'
)


def test_loops_multiply():
  text = _module(_WHILE, others=_LOOPS)
  (gathered,) = hlo.collectives(text, _MESH)
  assert gathered.times == 5 * 3  # the compiler's note, then the bound
  (product,) = hlo.products(text)
  assert product.times == 5
  assert product.flops == 2 * 2 * 4 * 3


def test_what_cannot_be_read_is_an_error():
  text = _module(_WHILE, others=_LOOPS.replace('direction=LT', 'direction=NE'))
  with pytest.raises(ValueError, match=r'length of loop w\.1'):
    hlo.collectives(text, _MESH)
  started = '%a = (f32[2], f32[8]) all-gather-start(%x), replica_groups={}'
  with pytest.raises(ValueError, match='all-gather-start'):
    hlo.collectives(_module(started), _MESH)
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo.products('HloModule')


def test_products_know_their_factors():
  lines = [
    '%a = bf16[3,2,8]{2,1,0} parameter(0)',
    '%b = bf16[3,8,4]{2,1,0} parameter(1)',
    '%c = f32[3,2,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0},'
    ' lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1},'
    ' operand_precision={highest,highest}, metadata={op_name="f/dot_general"}',
  ]
  (found,) = hlo.products(_module(*lines))
  assert found == hlo.Product(
    'bf16', 'highest', 2.0 * 3 * 2 * 4 * 8, 1, 'f/dot_general'
  )


def test_a_longer_axis_gathers_more_and_reduces_the_same():
  gather = _only(
    f'%a = f32[8]{{0}} all-gather(%x), {_GLOBAL}, replica_groups=[4,2]<=[2,4]'
    'T(1,0)',
    _MESH,
  )
  assert gather.wire_bytes == 16  # half of [8] to one other device
  assert hlo.lengthened(gather, _MESH, 'data', 4).wire_bytes == 16 * 7
  assert hlo.lengthened(gather, _MESH, 'fsdp', 4) is gather
  reduce = gather._replace(kind='all-reduce', wire_bytes=2 * 1 / 2 * 32)
  assert hlo.lengthened(reduce, _MESH, 'data', 4).wire_bytes == 2 * 7 / 8 * 32
  # Pairs along an axis of four do not grow with it.
  pairs = _only(
    f'%a = f32[8]{{0}} all-gather(%x), {_GLOBAL}, replica_groups=[4,2]<=[8]',
    _MESH,
  )
  assert pairs.axes == ('fsdp',)
  assert hlo.lengthened(pairs, _MESH, 'fsdp', 4) is pairs


def test_a_compiled_program_moves_what_it_says():
  """Each of jax's collectives, some in a loop of 5, on a mesh of 2 x 2 x 2."""
  mesh = sharding.make_mesh(sharding.MeshConfig(2, 2, 2), jax.devices())

  def moves(x):  # [4, 8] of float32, 128 bytes, on every device
    def turn(x, _):
      return lax.psum(x, 'tensor') * 0.5, ()

    x, _ = lax.scan(turn, x, length=5)
    wide = lax.all_gather(x, ('data', 'fsdp'))  # [4, 4, 8]
    part = lax.psum_scatter(x, 'fsdp', tiled=True)  # [2, 8]
    other = lax.all_to_all(x, 'data', 1, 0, tiled=True)
    turned = lax.ppermute(x, 'tensor', [(0, 1), (1, 0)])
    return sum(map(jnp.sum, (wide, part, other, turned)))[None]

  spec = PartitionSpec(('data', 'fsdp', 'tensor'))
  step = jax.jit(
    jax.shard_map(
      moves, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
  )
  argument = jax.ShapeDtypeStruct(
    (32, 8), jnp.float32, sharding=NamedSharding(mesh, spec)
  )
  text = step.lower(argument).compile().as_text()
  found = hlo.collectives(text, _CUBE)
  assert {(e.kind, e.axes, e.wire_bytes, e.times) for e in found} == {
    ('all-reduce', ('tensor',), 2 * 1 / 2 * 128, 5),
    ('all-gather', ('data', 'fsdp'), 3 / 4 * 512, 1),
    ('reduce-scatter', ('fsdp',), 1 / 2 * 128, 1),
    ('all-to-all', ('data',), 1 / 2 * 128, 1),
    ('collective-permute', ('tensor',), 128, 1),
  }


def test_products_shared_out_by_the_partitioner():
  mesh = sharding.make_mesh(sharding.MeshConfig(2, 2, 2), jax.devices())
  place = functools.partial(NamedSharding, mesh)
  # Rows on data, the sum's axis on tensor: [16, 64] x [32, 8].
  x = jax.ShapeDtypeStruct(
    (32, 64), jnp.float32, sharding=place(PartitionSpec('data', 'tensor'))
  )
  w = jax.ShapeDtypeStruct(
    (64, 8), jnp.float32, sharding=place(PartitionSpec('tensor', None))
  )
  product = jax.jit(jnp.matmul, out_shardings=place(PartitionSpec('data')))
  text = product.lower(x, w).compile().as_text()
  (found,) = hlo.products(text)
  assert found.flops == 2 * 16 * 32 * 8
  (summed,) = hlo.collectives(text, _CUBE)
  assert (summed.kind, summed.axes) == ('all-reduce', ('tensor',))
  assert summed.wire_bytes == 2 * 1 / 2 * 16 * 8 * 4
