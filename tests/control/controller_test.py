"""Launches with real processes: whatever dies, the run goes on or ends well."""

import os
import re
import signal
import time

import pytest

from launch.control import protocol
from launch.control import status
from launch.control import workdir_lock

Kind = protocol.EventKind


def _wait_until(condition):
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def _exists(pid):
  return os.path.exists(f'/proc/{pid}')


def test_a_worker_that_dies_is_restarted_until_done(launch):
  run = launch("""
if life == 1:
  train(0, 5)
  os.kill(os.getpid(), signal.SIGKILL)
if life == 2:
  sender.send(Kind.RESTORED, step=4)
  train(4, 7)
  raise OverflowError('boom')
sender.send(Kind.RESTORED, step=6)
train(6, config['train']['steps'])
sender.send(Kind.MESSAGE, text='summary: ' + os.environ['NPROC'])
""")
  assert run.finish() == 0
  assert run.exits() == [137, 1, 0]
  assert (
    'restarted the worker (killed by SIGKILL at step 5); it continues from '
    'step 4'
  ) in run.output
  assert 'OverflowError: boom' in run.output
  assert 'summary: ' in run.output
  assert 'error:' not in run.output
  assert [event.step for event in run.events(Kind.PROGRESS)][-1] == 10
  decisions = run.events(Kind.DECISION)
  assert [event.data['action'] for event in decisions] == ['start_workers'] * 3
  assert run.events(Kind.RUN_ENDED)[-1].data['exit_code'] == 0
  assert not workdir_lock.is_locked(str(run.workdir))


def test_a_worker_that_lives_and_does_nothing_is_killed_and_restarted(launch):
  run = launch(
    """
if life == 1:
  train(0, 5)
  os.kill(os.getpid(), signal.SIGSTOP)
train(5, 10)
""",
    '--config.launch.stuck_timeout_s=1',
  )
  assert run.finish() == 0
  assert run.exits() == [137, 0]
  kill = run.events(Kind.DECISION)[1].data
  assert kill['action'] == 'kill_workers'
  assert 'the workers are stuck after step 5: no sign of work' in kill['text']
  assert 'after the last one ended: the workers are stuck' in run.output


def test_when_one_of_two_workers_dies_both_are_started_again(launch):
  run = launch(
    """
if life == 1 and process == 1:
  wait_for_stop(0.3)
  os.kill(os.getpid(), signal.SIGKILL)
if life == 1:
  train(0, 5)
  wait_for_stop(60)
train(5, 10)
""",
    '--processes=2',
  )
  assert run.finish() == 0
  assert run.exits() == [137, 137, 0, 0]
  actions = [event.data['action'] for event in run.events(Kind.DECISION)]
  assert actions == ['start_workers', 'kill_workers', 'start_workers']
  assert 'restarted the worker (process 1 killed by SIGKILL' in run.output
  assert run.output.count('train: 10/10 steps') == 1


def test_a_worker_without_progress_is_given_up(launch):
  run = launch("train(0, 5); print('last words'); os._exit(3)")
  assert run.finish() == protocol.ExitCode.NO_PROGRESS
  assert run.exits() == [3] * 3
  last = run.output.splitlines()[-1]
  assert last.startswith('error: 2 restarts in a row did not reach a step bey')
  for part in ('3 attempts', 'last words', f'{run.workdir}/worker.log'):
    assert part in last


@pytest.mark.parametrize('exit_code', [2, 10, 11, 12])
def test_an_error_that_would_come_back_ends_the_run(launch, exit_code):
  run = launch(f"fail('what is wrong\\nand how to heal it', {exit_code})")
  assert run.finish() == exit_code
  assert run.exits() == [exit_code]
  assert run.output.splitlines()[1:] == [
    'error: what is wrong and how to heal it'
  ]


@pytest.mark.parametrize(
  'number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
)
def test_a_stop_lets_the_worker_save(launch, number):
  run = launch("""
sender.send(Kind.MESSAGE, text='ready')
wait_for_stop(20)
time.sleep(0.2)
sender.send(Kind.CHECKPOINT_SAVED, step=7)
sys.exit(13)
""")
  run.read_until('ready')
  run.process.send_signal(number)
  assert run.finish() == protocol.ExitCode.PREEMPTED
  assert run.exits() == [13]
  assert [event.step for event in run.events(Kind.CHECKPOINT_SAVED)] == [7]
  assert 'error: stopped as asked' in run.output.splitlines()[-1]


def test_a_worker_preempted_alone_is_restarted(launch):
  run = launch("""
if life == 2:
  sys.exit()
train(0, 3)
wait_for_stop(20)
sys.exit(13)
""")
  run.read_until('train')
  os.kill(run.worker_pid(), signal.SIGTERM)
  assert run.finish() == 0
  assert run.exits()[-1] == 0
  assert len(run.exits()) == 2


def test_a_worker_that_outstays_its_grace_is_killed(launch):
  run = launch(
    """
sender.send(Kind.MESSAGE, text='ready')
while sender.connected:
  time.sleep(0.01)
""",
    '--config.launch.grace_s=0.3',
  )
  run.read_until('ready')
  begun = time.monotonic()
  run.process.send_signal(signal.SIGTERM)
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == protocol.ExitCode.PREEMPTED
  assert time.monotonic() > begun + 0.3
  assert run.exits() == [137]
  assert not _exists(run.worker_pid())


def test_a_second_ctrl_c_kills_at_once(launch):
  run = launch("""
sender.send(Kind.MESSAGE, text='ready')
while sender.connected:
  time.sleep(0.01)
""")
  run.read_until('ready')
  run.process.send_signal(signal.SIGINT)
  run.read_until('SIGINT: waiting up to 30 s')
  run.process.send_signal(signal.SIGINT)
  assert run.finish() == protocol.ExitCode.PREEMPTED
  assert run.exits() == [137]


def test_a_stop_ends_a_wait_for_a_restart(launch):
  run = launch('train(0, 5); os._exit(1)', '--config.launch.backoff_s=1000.0')
  _wait_until(lambda: (run.workdir / 'lives0').exists())
  _wait_until(lambda: run.exits() == [1])
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == protocol.ExitCode.PREEMPTED
  assert run.exits() == [1]


def test_a_killed_launcher_leaves_no_orphan_and_the_next_one_continues(launch):
  source = """
if life == 1:
  train(0, 5)
  sender.send(Kind.MESSAGE, text='ready')
  wait_for_stop(20)
  deadline = time.monotonic() + 20
  while not os.path.exists(os.path.join(workdir, 'let_go')):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  sys.exit(0 if sender.connected else 13)
sender.send(Kind.MESSAGE, text='second life')
"""
  first = launch(source)
  first.read_until('ready')
  worker = first.worker_pid()
  # While both live, and while only the worker does, nobody else may start.
  second = launch(source)
  assert second.finish() == protocol.ExitCode.USER_ERROR
  assert f'in use by launcher {first.process.pid}' in second.output
  first.process.send_signal(signal.SIGKILL)
  first.process.wait()
  third = launch(source)
  assert third.finish() == protocol.ExitCode.USER_ERROR
  assert f'kill -9 {worker}' in third.output
  (first.workdir / 'let_go').touch()
  _wait_until(lambda: not workdir_lock.is_locked(str(first.workdir)))
  assert 'launcher died' in status.describe(str(first.workdir))
  fourth = launch(source)
  assert fourth.finish() == 0
  assert 'second life' in fourth.output
  assert len(fourth.events(Kind.RUN_STARTED)) == 2


def test_a_flood_does_not_fill_the_launcher(launch):
  run = launch("""
for number in range(3000):
  sender.send(Kind.PROGRESS, step=number, done=number, note='x' * 10_000)
""")
  assert run.finish() == 0
  assert len(run.events(Kind.PROGRESS)) == 2


def test_a_full_disk_under_the_journal_ends_the_run_after_a_save(launch):
  # SQLite's own limit stands for the disk's: both are SQLITE_FULL.
  patch = """
from launch.control import journal
init = journal.Journal.__init__
def limited(self, path):
  init(self, path)
  self._connection.execute('PRAGMA max_page_count=10')
journal.Journal.__init__ = limited
"""
  run = launch(
    """
sender.send(Kind.MESSAGE, text='x' * 39_000)
sender.send(Kind.MESSAGE, text='x' * 39_000)
wait_for_stop(20)
open(os.path.join(workdir, 'saved'), 'w').close()
sys.exit(13)
""",
    patch=patch,
  )
  assert run.finish() == protocol.ExitCode.DISK_FULL
  assert re.search(r'error: No space left.*journal.sqlite', run.output)
  assert (run.workdir / 'saved').exists()


def test_the_cores_of_the_first_start_are_kept(launch, monkeypatch):
  source = "sender.send(Kind.MESSAGE, text='NPROC ' + os.environ['NPROC'])"
  for value in ('5', '3'):
    monkeypatch.setenv('NPROC', value)
    run = launch(source)
    assert run.finish() == 0
    assert 'NPROC 5' in run.output


def test_a_workdir_removed_under_a_run_ends_it_in_one_line(launch, tmp_path):
  run = launch("""
sender.send(Kind.MESSAGE, text='ready')
while not stopped and sender.connected:
  time.sleep(0.05)
  sender.send(Kind.MESSAGE, text='still here')
open(os.path.join(workdir, '..', 'saved'), 'w').close()
sys.exit(13)
""")
  run.read_until('ready')
  run.workdir.rename(tmp_path / 'gone')
  run.workdir.mkdir()
  assert run.finish() == protocol.ExitCode.CRASHED
  assert re.search(r'error: .*journal.sqlite', run.output.splitlines()[-1])
  assert (tmp_path / 'saved').exists()
