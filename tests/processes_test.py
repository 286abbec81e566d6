"""Runs of several processes: the curve of one, whatever their number."""

import json
import os
import re
import signal

import numpy as np
import pytest

from tests import launched_run

_STEPS = 50
_FLAGS = (
  f'--config.train.steps={_STEPS}',
  '--config.evaluate.every=25',
  '--config.checkpoint.every=10',
  '--config.optimizer.poet.partitions=4',
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  directory = tmp_path_factory.mktemp('processes') / 'corpus'
  launched_run.write_corpus(directory)
  return directory


@pytest.fixture(scope='module')
def launched(tmp_path_factory, corpus):
  """`launched(name, processes)`: the finished run, made once."""
  runs = {}

  def get(name, processes):
    if (name, processes) not in runs:
      workdir = tmp_path_factory.mktemp(f'{name}-{processes}') / 'run'
      run = launched_run.LaunchedRun(
        workdir, corpus, *_FLAGS, f'--config.optimizer.name={name}'
      )
      run.launch(f'--processes={processes}')
      assert run.finish() == 0, run.errors()
      runs[name, processes] = run
    return runs[name, processes]

  return get


def _values(run, key):
  records = [json.loads(line) for line in run.values()]
  return [record[key] for record in records if key in record]


def _assert_same_curves(run, one):
  assert len(_values(run, 'loss')) == _STEPS
  for key in ('loss', 'validation_loss'):
    np.testing.assert_allclose(_values(run, key), _values(one, key), rtol=1e-5)


@pytest.mark.parametrize('name', ['adamw', 'poet'])
@pytest.mark.parametrize('processes', [2, 4])
def test_processes_share_out_the_work_of_one(launched, name, processes):
  run, one = launched(name, processes), launched(name, 1)
  assert _values(one, 'loss')[-1] < 0.8 * _values(one, 'loss')[0]
  _assert_same_curves(run, one)
  assert f'of {processes} processes' in run.values()[0]


def test_four_processes_that_are_stopped_go_on_as_two(
  launched, corpus, tmp_path
):
  run = launched_run.LaunchedRun(
    tmp_path / 'run', corpus, *_FLAGS, '--config.optimizer.name=poet'
  )
  mesh = ('--config.mesh.data=-1', '--config.mesh.fsdp=2')
  run.launch('--processes=4', *mesh)
  run.wait_for_step(15)
  run.signal_launcher(signal.SIGTERM)
  assert run.finish() == 13
  saved = run.saved_steps()[-1]
  assert 15 <= saved < _STEPS
  run.launch('--processes=2')
  assert run.finish() == 0
  assert f'continuing from step {saved}' in run.output()
  assert not run.events('replay_mismatch')
  _assert_same_curves(run, launched('poet', 1))


def test_a_killed_process_costs_steps_and_no_bits(launched, corpus, tmp_path):
  undisturbed = launched('adamw', 2)
  run = launched_run.LaunchedRun(
    tmp_path / 'run', corpus, *_FLAGS, '--config.optimizer.name=adamw'
  )
  run.launch('--processes=2')
  run.wait_for_step(13)
  pids = [e.data['pid'] for e in run.events('worker_started')]
  os.kill(pids[1], signal.SIGKILL)
  assert run.finish() == 0
  assert len(run.exits()) == 4
  launched_run.assert_same(run, undisturbed)


@pytest.mark.parametrize(
  ('flags', 'text'),
  [
    (['--config.mesh.data=3'], 'data=3, fsdp=1, tensor=1 does not fit 2'),
    (['--config.train.batch_size=14'], 'microbatches=7 rows do not share out'),
    (['--config.mesh.tensor=3'], 'does not fit 2 devices'),
  ],
)
def test_what_does_not_fit_the_processes_is_one_line(
  corpus, tmp_path, flags, text
):
  run = launched_run.LaunchedRun(tmp_path / 'run', corpus, *_FLAGS, *flags)
  run.launch('--processes=2')
  assert run.finish() == 2
  (line,) = run.errors().splitlines()
  assert line.startswith('error: ')
  assert re.search(text, line)
