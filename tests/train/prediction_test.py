"""Seconds and bytes by hand, for a device with round numbers."""

import dataclasses

import numpy as np
import pytest

from jaxllm import hlo
from jaxllm.model import decoder
from jaxllm.train import devices
from jaxllm.train import prediction

_GPU = devices.Gpu(
  kinds=(),
  bfloat16_flops=100.0,
  tensorfloat32_flops=50.0,
  float32_flops=10.0,
  memory_bytes=1e3,
  memory_bandwidth=20.0,
  link_bandwidth=6.0,
  network_bandwidth=1.0,
  gpus_per_node=8,
  achievable_flops=0.5,
  achievable_bandwidth=0.5,
)
_MODEL = decoder.DecoderConfig(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=64,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  rope_scaling=None,
  norm_epsilon=1e-6,
  attention_bias=False,
  mlp_bias=False,
  tie_embeddings=False,
  initializer='normalized',
  init_scale=1.0,
  embedding_stddev=0.02,
  compute_dtype='bfloat16',
  remat='full',
  attention='xla',
)


def _collective(axes, groups, wire_bytes, times) -> hlo.Collective:
  groups = np.array(groups)
  return hlo.Collective('all-reduce', axes, groups, wire_bytes, times, '')


@pytest.mark.parametrize(
  ('groups', 'bandwidth', 'is_local'),
  [
    ([[0, 1]], 6.0, True),
    ([[0, 4], [1, 5]], 6.0, True),
    ([[0, 8]], 1.0, False),
    ([[0, 1, 8, 9]], 2.0, False),
    ([[6, 7], [7, 8]], 1.0, False),  # the slowest group counts
    ([range(16)], 6.0, False),  # 8 adapters are faster than the links
  ],
)
def test_members_in_a_node_share_their_adapters(groups, bandwidth, is_local):
  found = prediction.link(np.array(groups), _GPU)
  assert found == (bandwidth, is_local)


def test_products_take_the_peak_of_their_dtype_and_precision():
  def seconds(dtype, precision):
    product = hlo.Product(dtype, precision, 300.0, 2, '')
    return prediction.products_s([product], _GPU)

  assert seconds('bf16', 'default') == 600 / 50
  assert seconds('f32', 'default') == 600 / 25
  assert seconds('f32', 'highest') == 600 / 5


def test_the_optimizer_takes_what_it_reads_and_writes():
  needs = prediction.Bytes(
    parameters=10.0, optimizer=20.0, gradients=20.0, update=0.0, activations=9.0
  )
  assert prediction.optimizer_s(needs, 1, _GPU) == (2 * 30 + 10) / 10
  # Each further microbatch reads the sum and a gradient, and writes the sum.
  assert prediction.optimizer_s(needs, 3, _GPU) == (2 * 30 + 10 + 2 * 30) / 10
  poet = needs._replace(update=1.0)
  assert prediction.optimizer_s(poet, 1, _GPU) == (2 * 30 + 10 + 20) / 10


def test_transfers_add_up_by_axes_and_kind():
  found = prediction.transfers(
    [
      _collective(('tensor',), [[0, 1]], 30.0, 4),
      _collective(('tensor',), [[0, 1]], 3.0, 1),
      _collective(('data',), [[0, 8]], 5.0, 2),
    ],
    _GPU,
  )
  assert found == {
    (('tensor',), 'all-reduce'): prediction.Transfer(123.0, 5, True, 41.0),
    (('data',), 'all-reduce'): prediction.Transfer(10.0, 2, False, 20.0),
  }


def test_a_step_lies_between_overlap_and_none():
  times = prediction.Times(products=3.0, optimizer=1.0, transfers=2.0)
  assert (times.overlapped, times.in_turn) == (4.0, 6.0)


def test_activations_are_those_of_the_rows_alone():
  def kept(rows, tensor=1, places=16, **changes):
    config = dataclasses.replace(_MODEL, **changes)
    return prediction.activation_bytes(config, rows, 16, places, tensor)

  assert kept(4) == 2 * kept(2)
  # With full remat a layer keeps its input, in bfloat16.
  assert kept(4, num_layers=8) - kept(4) == 5 * 4 * 16 * 32 * 2
  assert kept(4) < kept(4, remat='dots') < kept(4, remat='none')
  assert kept(4, remat='dots', tensor=2) < kept(4, remat='dots')
  # Of a chunk of 2 of 16 places: logits and their gradient, nothing else.
  chunk = 2 * 4 * (4 * 2 * 64)
  assert kept(4, places=2) - chunk < kept(4) - 4 * (4 * 16 * 64)


def test_every_gpu_of_the_table_has_a_peak_by_its_kind():
  for gpu in devices.GPUS.values():
    for kind in gpu.kinds:
      assert devices.PEAK_FLOPS[kind] == gpu.bfloat16_flops
    assert gpu.bfloat16_flops > gpu.tensorfloat32_flops > gpu.float32_flops
    assert gpu.memory_bandwidth > gpu.link_bandwidth > gpu.network_bandwidth
