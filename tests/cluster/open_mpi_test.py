"""Launchers that mpirun starts, with the Open MPI that is installed here."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]

_LAUNCHER = """
import dataclasses, json, os
from launch.control import placement
given = placement.Given(None, None, False, None, None, None, None)
found = placement.find(given, os.environ, [], placement.resolve)
print(json.dumps(dataclasses.asdict(found)))
"""


@pytest.fixture(scope='module')
def mpirun():
  path = shutil.which('mpirun')
  if path is None:
    pytest.skip('mpirun not installed; on Debian: apt-get install openmpi-bin')
  result = subprocess.run(
    [path, '--version'], capture_output=True, text=True, check=True
  )
  if 'Open MPI' not in result.stdout and 'open-mpi' not in result.stdout:
    pytest.skip(f'{path} is not of Open MPI: {result.stdout.splitlines()[0]}')
  return path


@pytest.mark.parametrize('launchers', [1, 2])
def test_launchers_on_one_machine(mpirun, tmp_path, launchers):
  program = tmp_path / 'launcher.py'
  program.write_text(_LAUNCHER)
  result = subprocess.run(
    [
      *(mpirun, '--oversubscribe', '-np', str(launchers)),
      *(sys.executable, str(program)),
    ],
    capture_output=True,
    text=True,
    check=True,
    timeout=60,
    env={
      **os.environ,
      'PYTHONPATH': str(_ROOT),
      # Else it refuses to run as root, as in containers.
      'OMPI_ALLOW_RUN_AS_ROOT': '1',
      'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    },
  )
  found = [json.loads(line) for line in result.stdout.splitlines()]
  found.sort(key=lambda each: each['host'])
  assert [each['host'] for each in found] == list(range(launchers))
  assert {each['hosts'] for each in found} == {launchers}
  assert len({each['coordinator'] for each in found}) == 1
  first, *others = found
  assert first['bind'] == first['coordinator']
  assert bool(first['coordinator']) == (launchers > 1)
  assert not any(each['bind'] for each in others)
