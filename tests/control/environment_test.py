"""The flags that a worker gets: known to XLA, and the user's win."""

import os
import subprocess
import sys

import pytest

from launch.control import environment


def _of(given, **changes):
  settings = dict(
    num_cores=3, gpus=None, collective_timeout_s=90.0, deterministic=True
  )
  return environment.of_worker(given, **{**settings, **changes})


def test_xla_accepts_every_flag():
  code = 'import jax; print(jax.jit(lambda x: x + 1)(1))'
  given = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  result = subprocess.run(
    [sys.executable, '-c', code],
    env={**given, **_of({})},
    capture_output=True,
    text=True,
    check=True,
  )
  assert result.stdout == '2\n'


def test_what_the_user_set_wins():
  given = {
    'XLA_FLAGS': '--xla_cpu_collective_timeout_seconds=7',
    'NCCL_DEBUG': 'INFO',
  }
  added = _of(given)
  assert added['XLA_FLAGS'].endswith('--xla_cpu_collective_timeout_seconds=7')
  assert 'NCCL_DEBUG' not in added
  assert 'XLA_PYTHON_CLIENT_MEM_FRACTION' in added


@pytest.mark.parametrize('deterministic', [True, False])
def test_determinism_is_a_flag(deterministic):
  flags = _of({}, deterministic=deterministic)['XLA_FLAGS']
  assert ('exclude_nondeterministic_ops=true' in flags) == deterministic


@pytest.mark.parametrize('gpus', [None, '2,3', ''])
def test_gpus_are_left_alone_or_named(gpus):
  assert _of({}, gpus=gpus).get('CUDA_VISIBLE_DEVICES') == gpus


def test_every_wait_between_processes_has_an_end():
  flags = _of({}, collective_timeout_s=90.4)['XLA_FLAGS'].split()
  timeouts = [flag for flag in flags if 'timeout' in flag]
  assert len(timeouts) == 3
  assert all(flag.endswith('=90') for flag in timeouts)
