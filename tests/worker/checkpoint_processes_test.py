"""Several processes write and read checkpoints, and end alike if one cannot."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from launch.worker import checkpoint
from tests.worker import checkpoint_process

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = 'tests.worker.checkpoint_process'
# Generous, for a loaded machine.
_DEADLINE_S = 300


def _run(count, directory, *commands):
  """Outcomes of the commands, `[commands][processes]`."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': (
      '--xla_backend_optimization_level=0'
      ' --xla_cpu_collective_timeout_seconds=60'
    ),
  }
  started = []
  with contextlib.ExitStack() as stack:
    for number in range(count):
      output = stack.enter_context(tempfile.TemporaryFile('w+'))
      arguments = [number, count, address, directory, json.dumps(commands)]
      child = subprocess.Popen(
        [sys.executable, '-m', _PROGRAM, *map(str, arguments)],
        cwd=_ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
      )
      stack.callback(child.wait)
      stack.callback(child.kill)
      started.append((child, output))
    results = []
    for child, output in started:
      code = child.wait(_DEADLINE_S)
      output.seek(0)
      lines = output.read().splitlines()
      assert code == 0, '\n'.join(lines)
      (result,) = [line for line in lines if line.startswith('[{')]
      results.append(json.loads(result))
  return list(zip(*results, strict=True))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A directory with steps 1 and 2 of four processes, and their outcomes."""
  directory = tmp_path_factory.mktemp('saved') / 'checkpoints'
  commands = [('save', 1), ('save', 2), ('list_at_the_end', None)]
  return directory, _run(4, directory, *commands)


@pytest.fixture(scope='module')
def two(saved, tmp_path_factory):
  """Outcomes of two processes with a copy of that directory, by command."""
  directory = tmp_path_factory.mktemp('two') / 'checkpoints'
  shutil.copytree(saved[0], directory)
  directory.chmod(0o700)
  commands = [
    ('restore', None),
    ('restore_params', str(directory)),
    ('save_with_one_that_cannot', 3),
    ('list', None),
    ('save', 3),
  ]
  if os.geteuid() == 0:
    commands.append(('restore_with_one_that_may_not_read', None))
  commands += [('flip', 3), ('restore_damaged', None)]
  commands += [('list_at_the_end', None)]
  outcomes = _run(2, directory, *commands)
  return {
    name: outcome for (name, _), outcome in zip(commands, outcomes, strict=True)
  }


def _good(result):
  return {'result': result, 'error': None}


def test_the_first_process_reports_and_all_learn_of_a_commit(saved):
  _, outcomes = saved
  results = ([1], [2], ['1', '2'])
  assert outcomes == [(_good(result),) * 4 for result in results]


def test_one_process_restores_what_four_saved(saved):
  directory, _ = saved
  config = checkpoint.CheckpointConfig(1, 2, 0)
  checkpoints = checkpoint.Checkpoints(str(directory), config, pytest.fail)
  for sizes in ((8, 1), (1, 2), (1, 1)):
    devices = np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes)
    target = checkpoint_process.target(Mesh(devices, ('rows', 'columns')))
    restored = checkpoints.restore(target)
    assert (restored.step, restored.metadata) == (2, {'position': 20})
    assert checkpoint_process.is_same(
      restored.state, checkpoint_process.expected(2)
    )
  checkpoints.close()


def test_two_processes_restore_what_four_saved(two):
  result = {
    'step': 2,
    'metadata': {'position': 20},
    'same': True,
    'dropped': [],
  }
  assert two['restore'] == (_good(result),) * 2
  assert two['restore_params'] == (_good(True),) * 2


def test_a_write_that_fails_in_one_process_fails_in_all(two):
  first, second = two['save_with_one_that_cannot']
  assert first == second
  assert first['error'].startswith(
    'OSError: [Errno 27] the checkpoint of step 3 was not written: File too'
  )
  # What was still being written in the other process may be there, unnamed.
  listed = set(two['list'][0]['result'])
  assert listed - {'3.orbax-checkpoint-tmp'} == {'1', '2'}
  # With room again the same step is saved.
  assert two['save'] == (_good([3]),) * 2


@pytest.mark.skipif(os.geteuid() != 0, reason='needs to become another user')
def test_what_one_process_may_not_read_is_an_error_in_all(two):
  first, second = two['restore_with_one_that_may_not_read']
  assert first == second
  assert first['error'].startswith('ValueError: checkpoints in ')
  assert 'Permission denied. Make it' in first['error']


def test_all_processes_pass_over_a_damaged_checkpoint(two):
  outcomes = two['restore_damaged']
  assert [outcome['error'] for outcome in outcomes] == [None, None]
  results = [outcome['result'] for outcome in outcomes]
  assert [result['step'] for result in results] == [2, 2]
  assert all(result['same'] for result in results)
  assert [result['dropped'] for result in results] == [[3], []]
  assert two['list_at_the_end'][0]['result'] == ['2', '3.corrupt']
