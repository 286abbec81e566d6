"""Several launchers on this machine, as if each was a host of its own."""

import contextlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from launch.control import channel
from launch.control import journal
from launch.control import protocol
from launch.control import workdir_lock
from tests.control import conftest

Kind = protocol.EventKind
ExitCode = protocol.ExitCode

_FIRST_LIFE_WAITS = """
if life == 1:
  sender.send(Kind.MESSAGE, text='ready')
  wait_for_stop(60)
  sys.exit(13)
"""
_WAIT_FOR_STOP = """
sender.send(Kind.MESSAGE, text='ready')
wait_for_stop(60)
sys.exit(13)
"""


class Hosts:
  """Launchers of one run; every worker runs `source`."""

  def __init__(self, directory, source, num_hosts, *flags):
    self.workdir = directory / 'run'
    config = directory / 'config.py'
    config.write_text(conftest.CONFIG)
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      port = probe.getsockname()[1]
    self._command = [
      *(sys.executable, '-c', conftest.LAUNCHER, conftest.WORKER + source),
      *(f'--config={config}', f'--workdir={self.workdir}'),
      *(f'--hosts={num_hosts}', f'--coordinator=127.0.0.1:{port}'),
      *flags,
    ]
    self._directory = directory
    self.launchers = []

  def start(self, *flags):
    """Starts a launcher and returns its index."""
    index = len(self.launchers)
    with open(self._directory / f'{index}.out', 'w') as out:
      self.launchers.append(
        subprocess.Popen(
          [*self._command, *flags], stdout=out, stderr=subprocess.STDOUT
        )
      )
    return index

  def output(self, index):
    return (self._directory / f'{index}.out').read_text()

  def wait_for(self, index, text):
    deadline = time.monotonic() + 60
    while text not in self.output(index):
      assert time.monotonic() < deadline, self.output(index)
      time.sleep(0.02)

  def finish(self, index):
    """Waits for a launcher's end: its exit code and last line."""
    exit_code = self.launchers[index].wait(timeout=60)
    output = self.output(index)
    assert 'Traceback' not in output
    return exit_code, (output.splitlines() or [''])[-1]

  def events(self, kind):
    events = journal.read(str(self.workdir / 'journal.sqlite'))
    return [event for event in events if event.kind == kind]


@pytest.fixture
def hosts(tmp_path):
  with contextlib.ExitStack() as stack:

    def make(source, num_hosts, *flags):
      made = Hosts(tmp_path, source, num_hosts, *flags)

      def kill():
        for launcher in made.launchers:
          launcher.kill()
          launcher.wait()

      stack.callback(kill)
      return made

    yield make


def test_a_crash_on_another_host_restarts_all_workers(hosts):
  run = hosts(
    """
if process == 3 and life == 1:
  os.kill(os.getpid(), signal.SIGKILL)
if life == 1:
  wait_for_stop(60)
train(0, 10)
print(flags['processes'], flags['coordinator'])
""",
    2,
    '--processes=2',
  )
  run.start('--host=1')
  run.start('--host=0')
  assert run.finish(1) == (
    0,
    'train: 10/10 steps, loss 0.1, 00:00 elapsed, 00:00 left',
  )
  assert run.finish(0)[0] == 0
  starts = [e for e in run.events(Kind.DECISION) if 'hosts' in e.data]
  hosts_ = [['host 0', 2], ['host 1', 2]]
  assert [start.data['hosts'] for start in starts] == [hosts_] * 2
  assert 'after the last one ended: process 3 killed by SIGKILL' in run.output(
    1
  )
  logs = [
    (run.workdir / name).read_text().splitlines()[-1]
    for name in ('worker.log', 'worker.3.log')
  ]
  assert logs[0] == logs[1]
  assert logs[0].startswith('4 127.0.0.1:')


def test_a_stop_of_the_first_launcher_ends_all(hosts):
  run = hosts(_WAIT_FOR_STOP, 2)
  run.start('--host=0')
  run.start('--host=1')
  run.wait_for(0, 'ready')
  run.launchers[0].send_signal(signal.SIGTERM)
  for index in (0, 1):
    exit_code, line = run.finish(index)
    assert exit_code == ExitCode.PREEMPTED
    assert 'the same command continues the run' in line


def test_a_launcher_that_is_stopped_leaves_and_may_come_back(hosts):
  run = hosts(
    """
def note(name):
  open(os.path.join(workdir, name), 'w').close()
def wait_for(name):
  while not os.path.exists(os.path.join(workdir, name)):
    time.sleep(0.01)
if life == 1 and process == 1:
  note('ready')
  wait_for_stop(60)
  note('saved')
  sys.exit(13)
if life == 1:
  wait_for('ready')
  sender.send(Kind.MESSAGE, text='both are ready')
  wait_for('saved')
  sys.exit(13)
""",
    2,
  )
  run.start('--host=0')
  run.start('--host=1')
  run.wait_for(0, 'both are ready')
  run.launchers[1].send_signal(signal.SIGTERM)
  assert run.finish(1)[0] == ExitCode.PREEMPTED
  (lost,) = run.events(Kind.HOST_LOST)
  assert lost.data['text'] == 'host 1 left: asked to stop'
  run.start('--host=1')
  assert run.finish(2)[0] == 0
  assert run.finish(0)[0] == 0


def test_a_standby_takes_the_place_of_a_host_that_died(hosts):
  run = hosts(
    _FIRST_LIFE_WAITS,
    2,
    '--config.launch.heartbeat_timeout_s=2',
  )
  run.start('--host=0')
  run.start('--standby')
  run.wait_for(1, 'joined the run')
  run.start('--host=1')
  run.wait_for(0, 'ready')
  run.launchers[2].kill()
  assert run.finish(0)[0] == 0
  assert run.finish(1)[0] == 0
  assert 'taking the place of host 1' in run.output(1)
  assert 'host 1 was not heard of for 2 s' in run.output(0)


def test_hosts_that_do_not_come_end_all_with_a_line(hosts):
  run = hosts('', 3, '--config.launch.join_timeout_s=3')
  run.start('--host=0')
  run.start('--host=2')
  for index in (0, 1):
    exit_code, line = run.finish(index)
    assert exit_code == ExitCode.PEER_LOST
    assert 'host 1 of 3 hosts did not join within 3 s' in line


@pytest.mark.parametrize('begun', [False, True])
def test_a_first_launcher_that_is_not_there_is_told(hosts, begun):
  run = hosts('', 2, '--config.launch.join_timeout_s=2')
  if begun:  # It was there once.
    run.workdir.mkdir()
    channel.make_secret(str(run.workdir / 'secret'))
  run.start('--host=1')
  exit_code, line = run.finish(0)
  if begun:
    assert exit_code == ExitCode.PEER_LOST
    assert 'no answer from the first launcher at 127.0.0.1:' in line
  else:
    assert exit_code == ExitCode.USER_ERROR
    assert 'secret did not appear within 2 s: start the first' in line


def test_two_launchers_with_one_number_are_told_apart(hosts, tmp_path):
  run = hosts(_WAIT_FOR_STOP, 3, '--config.launch.join_timeout_s=20')
  run.start('--host=0')
  run.start('--host=1')
  run.wait_for(1, 'joined')
  # On another machine; here its lock would be in the way.
  (run.workdir / 'hosts' / '1').rename(tmp_path / 'elsewhere')
  run.start('--host=1')
  exit_code, line = run.finish(2)
  assert exit_code == ExitCode.USER_ERROR
  assert 'two launchers say that they are host 1' in line
  assert 'give each its own --host' in line
  assert 'warning: two launchers say that they are host 1' in run.output(0)


def test_a_host_that_comes_back_too_late_is_a_standby(hosts):
  run = hosts(
    """
if life == 1:
  sender.send(Kind.MESSAGE, text='ready')
  wait_for_stop(60)
  sys.exit(13)
if life == 2:
  wait_for_stop(60)
  sys.exit(13)
""",
    2,
    '--config.launch.heartbeat_timeout_s=2',
  )
  run.start('--host=0')
  run.start('--standby')
  run.wait_for(1, 'joined the run')
  run.start('--host=1')
  run.wait_for(0, 'ready')
  run.launchers[2].kill()
  run.wait_for(1, 'taking the place of host 1')
  run.start('--host=1')
  run.wait_for(3, 'a standby has the place of host 1 by now')
  run.wait_for(3, 'as a standby')
  run.launchers[0].send_signal(signal.SIGTERM)
  for index in (0, 1, 3):
    assert run.finish(index)[0] == ExitCode.PREEMPTED


def test_members_of_a_launcher_that_died_join_its_successor(hosts):
  run = hosts(
    _FIRST_LIFE_WAITS,
    2,
  )
  run.start('--host=0')
  run.start('--host=1')
  run.wait_for(0, 'ready')
  run.launchers[0].kill()
  run.launchers[0].wait()
  while workdir_lock.is_locked(str(run.workdir)):  # by its worker
    time.sleep(0.02)
  run.start('--host=0')
  for index in (1, 2):
    assert run.finish(index)[0] == 0
  assert run.output(1).count('joined the run') == 2


def test_a_launcher_that_was_killed_may_be_started_again_at_once(hosts):
  run = hosts(
    _FIRST_LIFE_WAITS,
    2,
    '--config.launch.heartbeat_timeout_s=3',
  )
  run.start('--host=0')
  run.start('--host=1')
  run.wait_for(0, 'ready')
  run.launchers[1].kill()
  run.launchers[1].wait()
  lock = str(run.workdir / 'hosts' / '1')
  while workdir_lock.is_locked(lock):  # by its worker, which ends soon
    time.sleep(0.02)
  run.start('--host=1')
  assert run.finish(2)[0] == 0
  assert run.finish(0)[0] == 0


@pytest.mark.parametrize(
  ('flags', 'text'),
  [
    (['--host=1', '--config.train.steps=11'], 'has another config'),
    (['--host=4', '--hosts=5'], 'knows hosts 0 to 1'),
  ],
)
def test_a_launcher_of_another_run_is_refused(hosts, flags, text):
  run = hosts(_WAIT_FOR_STOP, 2)
  run.start('--host=0')
  run.start(*flags)
  exit_code, line = run.finish(1)
  assert exit_code == ExitCode.USER_ERROR
  assert text in line


def test_a_launcher_with_another_secret_is_refused(hosts):
  run = hosts(_WAIT_FOR_STOP, 2)
  run.start('--host=0')
  run.wait_for(0, 'run in')
  secret = run.workdir / 'secret'
  secret.write_text('f' * 64)
  run.start('--host=1')
  exit_code, line = run.finish(1)
  assert exit_code == ExitCode.USER_ERROR
  assert 'the launchers do not have the same secret' in line


def test_a_port_that_is_taken_is_told(hosts):
  run = hosts(_WAIT_FOR_STOP, 2)
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    address = f'127.0.0.1:{taken.getsockname()[1]}'
    run.start('--host=0', f'--bind={address}')
    exit_code, line = run.finish(0)
  assert exit_code == ExitCode.USER_ERROR
  assert f'cannot listen at {address}' in line
  assert '--bind=ADDRESS:PORT' in line
