"""Which rows a process reads, and how they become one batch."""

import jax
import numpy as np
import pytest

from jaxllm import sharding
from launch.worker import agreement
from launch.worker import processes
from launch.worker import program


@pytest.mark.parametrize('sizes', [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_one_process_reads_all_rows_and_they_keep_their_order(sizes):
  mesh = sharding.make_mesh(sharding.MeshConfig(*sizes), jax.devices())
  place = sharding.batch_sharding(mesh)
  assert processes.local_rows(place, 16) == range(16)
  rows = np.arange(16 * 3).reshape(16, 3)
  batch = processes.global_batch(place, 16, {'tokens': rows})
  np.testing.assert_array_equal(batch['tokens'], rows)
  assert batch['tokens'].sharding == place


@pytest.mark.parametrize('flag', [0, 1])
def test_a_flag_is_on_every_device(flag):
  mesh = sharding.make_mesh(sharding.MeshConfig(2, 2, 2), jax.devices())
  flags = processes.on_devices(program.every_device(mesh), flag)
  assert flags.shape == (8,)
  assert flags.dtype == np.int32
  assert len(flags.addressable_shards) == 8
  assert {int(shard.data[0]) for shard in flags.addressable_shards} == {flag}


def test_one_process_waits_for_nobody():
  processes.join(0, 1, '', '', 0.0)
  processes.wait_for_all('here', 0.0)
  with processes.first_one_first('here', stop=False):
    assert agreement.is_first()
  processes.leave()
