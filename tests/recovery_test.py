"""A run survives every fault with the same bits as without it.

Each test disturbs real processes and compares every logged value and the final
state with those of an undisturbed run in another workdir.
"""

import contextlib
import fcntl
import os
import random
import shutil
import signal

import pytest

from launch import main
from launch.control import protocol
from launch.control import workdir_lock
from tests import launched_run

_KILLED = 128 + signal.SIGKILL
_ADAMW = '--config.optimizer.name=adamw'


@pytest.fixture(scope='session')
def shared(tmp_path_factory):
  """A directory that all test processes of this session share."""
  base = tmp_path_factory.getbasetemp()
  parallel = 'PYTEST_XDIST_WORKER' in os.environ
  return base.parent if parallel else base


@pytest.fixture(scope='session')
def corpus(shared):
  directory = shared / 'corpus'
  with _locked(shared):
    if not directory.exists():
      launched_run.write_corpus(directory)
  return directory


@pytest.fixture(scope='session')
def undisturbed(shared, corpus):
  """`undisturbed(*flags)`: a finished run; each is run once and shared."""

  def run(*flags):
    name = f'undisturbed{"-".join(flags).replace("/", "")}'
    finished = launched_run.LaunchedRun(shared / name, corpus, *flags)
    with _locked(shared):
      if not finished.workdir.exists():
        finished.launch()
        assert finished.finish() == 0, finished.errors()
    assert finished.logged_step() == 24
    return finished

  return run


@pytest.fixture
def run_in(tmp_path, corpus):
  """`run_in(name, *flags)`: a run to disturb."""
  with contextlib.ExitStack() as stack:

    def run(name, *flags):
      new = launched_run.LaunchedRun(tmp_path / name, corpus, *flags)
      stack.callback(new.close)
      return new

    yield run


@pytest.mark.parametrize(
  ('flags', 'signals'),
  [
    ((), (signal.SIGKILL, signal.SIGKILL)),
    ((_ADAMW,), (signal.SIGTERM, signal.SIGKILL)),
  ],
)
def test_a_worker_that_dies_is_restarted_with_equal_bits(
  run_in, undisturbed, capsys, flags, signals
):
  reference = undisturbed(*flags)
  run = run_in('run', *flags)
  run.launch()
  generator = random.Random(len(flags))
  # Far enough apart that the second attempt trains before it dies.
  steps = (generator.randrange(2, 8), generator.randrange(13, 19))
  for attempt, (step, number) in enumerate(zip(steps, signals, strict=True), 1):
    run.wait_for_step(step)
    assert f'running, attempt {attempt}' in _status(run, capsys)
    run.signal_worker(number)
    run.wait_until(lambda n=attempt: len(run.events('worker_started')) > n)
  assert run.finish() == 0
  codes = {signal.SIGTERM: protocol.ExitCode.PREEMPTED, signal.SIGKILL: _KILLED}
  assert run.exits() == [*(codes[number] for number in signals), 0]
  assert run.output().count('restarted the worker') == len(signals)
  launched_run.assert_same(run, reference)
  status = _status(run, capsys)
  assert 'state        done' in status
  assert 'step         24' in status
  assert f'restarts     {len(signals)}' in status


def test_a_stopped_launch_saves_and_the_same_command_continues(
  run_in, undisturbed, capsys
):
  reference = undisturbed(_ADAMW)
  run = run_in('run', _ADAMW)
  run.launch()
  run.wait_for_step(4)
  run.signal_launcher(signal.SIGTERM)
  assert run.finish() == protocol.ExitCode.PREEMPTED
  stopped_at = run.logged_step()
  assert run.saved_steps()[-1] == stopped_at < 24
  assert 'the same command continues the run' in run.errors()
  assert 'preempted' in _status(run, capsys)
  run.launch()
  assert run.finish() == 0
  assert f'continuing from step {stopped_at}' in run.output()
  launched_run.assert_same(run, reference)


def test_a_killed_launcher_leaves_a_saved_run_and_no_orphan(
  run_in, undisturbed, capsys
):
  reference = undisturbed(_ADAMW)
  run = run_in('run', _ADAMW)
  run.launch()
  run.wait_for_step(4)
  run.signal_launcher(signal.SIGKILL)
  run.wait_until(lambda: not workdir_lock.is_locked(str(run.workdir)))
  assert run.saved_steps()[-1] == run.logged_step() < 24
  assert 'broken off' in _status(run, capsys)
  run.launch()
  assert run.finish() == 0
  launched_run.assert_same(run, reference)


def test_a_kill_in_the_middle_of_a_checkpoint_loses_nothing(
  run_in, undisturbed
):
  reference = undisturbed(_ADAMW)
  run = run_in('run', _ADAMW, '--config.checkpoint.every=1')
  run.launch()
  run.wait_for_step(3)
  _stop_while_writing(run)
  run.signal_worker(signal.SIGKILL)
  assert run.finish() == 0
  assert run.exits() == [_KILLED, 0]
  launched_run.assert_same(run, reference)


def test_a_damaged_checkpoint_is_passed_over(run_in, undisturbed):
  """Also: a window of the steps that are repeated is traced."""
  reference = undisturbed()
  run = run_in('run')
  shutil.copytree(reference.workdir, run.workdir)
  assert run.saved_steps() == [21, 24]
  _flip_a_byte(run.checkpoints / '24')
  lines = (run.workdir / 'metrics.jsonl').read_text().splitlines(True)
  (run.workdir / 'metrics.jsonl').write_text(''.join(lines[:-1]))
  run.launch('--config.profile.start=22', '--config.profile.steps=1')
  assert run.finish() == 0
  assert 'checkpoint dropped (step 24): ' in run.errors()
  assert 'continuing from step 21' in run.output()
  launched_run.assert_same(run, reference)
  assert (run.checkpoints / '24.corrupt').is_dir()
  assert list((run.workdir / 'profile').rglob('*.xplane.pb'))


def test_a_worker_that_always_dies_at_once_is_given_up(run_in):
  run = run_in('run', _ADAMW, '--config.launch.max_restarts_without_progress=2')
  run.launch()
  run.wait_for_step(3)
  for attempt in (1, 2, 3):
    run.wait_until(lambda n=attempt: len(run.events('worker_started')) == n)
    run.signal_worker(signal.SIGKILL)
    run.wait_until(lambda n=attempt: len(run.exits()) == n)
  assert run.finish() == protocol.ExitCode.NO_PROGRESS
  assert run.exits() == [_KILLED] * 3
  last = run.errors().splitlines()[-1]
  assert last.startswith('error: 2 restarts in a row did not reach a step bey')
  assert 'killed by SIGKILL' in last
  assert str(run.workdir / 'worker.log') in last


def _stop_while_writing(run):
  """Halts the worker at a moment when a checkpoint is half written."""
  for _ in range(100):
    run.wait_until(lambda: _half_written(run))
    run.signal_worker(signal.SIGSTOP)
    if _half_written(run):
      return
    # It was complete before the signal arrived.
    run.signal_worker(signal.SIGCONT)
  raise AssertionError('no checkpoint was caught half written')


def _half_written(run):
  return any(
    files
    for directory in run.checkpoints.glob('*.orbax-checkpoint-tmp')
    for _, _, files in os.walk(directory)
  )


def _flip_a_byte(directory):
  """Changes one byte in the middle of the largest file."""
  files = [path for path in directory.rglob('*') if path.is_file()]
  path = max(files, key=lambda file: file.stat().st_size)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 0x10
  path.write_bytes(content)


def _status(run, capsys):
  capsys.readouterr()
  assert main.main(['', 'status', f'--workdir={run.workdir}']) == 0
  return capsys.readouterr().out


@contextlib.contextmanager
def _locked(directory):
  with open(directory / 'undisturbed.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
