"""The agent with real processes: whatever a worker does, its end is told."""

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from launch.control import agent as agent_lib
from launch.control import protocol
from launch.control import worker_process

Kind = protocol.EventKind

_PREAMBLE = """
import os, signal, sys, time
from launch.control import protocol
from launch.worker import reporter
Kind = protocol.EventKind
fd = int(sys.argv[-1].removeprefix('--events_fd='))
sender = reporter.Reporter(fd, 0)
"""


class Watched:
  """An agent whose worker runs `source`, and the events it delivered."""

  def __init__(self, directory, source, command=None, processes=1):
    self.log_path = str(directory / 'worker.log')
    self.lock = open(directory / 'lock', 'w')  # noqa: SIM115
    self.inbox = queue.Queue()
    self.pids = []
    self.agent = agent_lib.Agent(
      command=command or [sys.executable, '-c', _PREAMBLE + source],
      environments=[{'NPROC': '3'}] * processes,
      log_path=lambda process: self.log_path + '.1' * process,
      lock_fd=self.lock.fileno(),
      on_worker_pids=self.pids.extend,
      deliver=self.inbox.put,
    )

  def run(self, attempt=1):
    """Starts the worker and returns everything until its end."""
    events = list(self.agent.start(_assignment(attempt)))
    while events[-1].kind != Kind.WORKER_EXITED:
      events.append(self.next())
    return events

  def next(self):
    return self.inbox.get(timeout=20)

  def log(self):
    with open(self.log_path) as file:
      return file.read()

  def wait_for(self, text):
    event = self.next()
    assert event.data.get('text') == text, event


@pytest.fixture
def watch(tmp_path):
  with contextlib.ExitStack() as stack:

    def make(source, command=None, processes=1):
      watched = Watched(tmp_path, source, command, processes)
      stack.callback(watched.lock.close)
      stack.callback(watched.agent.close)
      return watched

    yield make


def _assignment(attempt, processes=1):
  return agent_lib.Assignment(attempt, 0, processes, '127.0.0.1:1', '')


def _is_gone(pid):
  """Whether a process ended; a zombie that its parent has yet to reap did."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rsplit(')', 1)[1].split()[0] == 'Z'
  except FileNotFoundError:
    return True


def _wait_until(condition):
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_events_arrive_in_order_before_the_end(watch):
  watched = watch("""
print('to the log', os.environ['NPROC'])
for step in range(500):
  sender.send(Kind.PROGRESS, step=step, done=step)
""")
  first, *progress, last = watched.run()
  (pid,) = watched.pids
  assert first.data == {
    'attempt': 1,
    'process': 0,
    'processes': 1,
    'pid': pid,
  }
  assert [event.step for event in progress] == list(range(500))
  assert last.data == {
    'attempt': 1,
    'process': 0,
    'exit_code': 0,
    'log_tail': '',
  }
  assert 'to the log 3' in watched.log()


def test_a_crash_without_a_word_shows_the_end_of_its_log_only(watch):
  watched = watch("""
for number in range(100):
  print('line', number)
raise SystemError('boom')
""")
  for attempt in (1, 2):
    last = watched.run(attempt)[-1]
    assert last.data['exit_code'] == 1
    lines = last.data['log_tail'].split('\n')
    assert lines[-1] == 'SystemError: boom'
    assert len(lines) == worker_process.LOG_TAIL_LINES
  assert '=== attempt 2' in watched.log()


def test_the_tail_holds_nothing_of_an_earlier_attempt(watch):
  watched = watch("print('only this'); os._exit(1)")
  watched.run(1)
  assert watched.run(2)[-1].data['log_tail'] == 'only this'


def test_a_crash_that_explained_itself_needs_no_log(watch):
  watched = watch("""
print('noise')
sender.send(Kind.ERROR, text='out of memory', exit_code=11, traceback='')
os._exit(11)
""")
  _, error, last = watched.run()
  assert error.data['text'] == 'out of memory'
  assert last.data['exit_code'] == 11
  assert last.data['log_tail'] == ''


def test_a_signal_is_told_as_a_shell_would(watch):
  watched = watch('os.kill(os.getpid(), signal.SIGKILL)')
  assert watched.run()[-1].data['exit_code'] == 128 + 9


def test_garbage_on_the_pipe_becomes_a_few_warnings(watch):
  watched = watch("""
sender.send(Kind.MESSAGE, text='before')
os.write(fd, b'garbage\\n')
os.write(fd, b'{"kind":"run_ended"}\\n')
for kind, source in (('run_ended', 'worker'), ('message', 'controller')):
  data = {'exit_code': 0, 'text': 'forged'}
  event = protocol.Event(Kind(kind), source, 1.0, None, data)
  os.write(fd, protocol.encode(event))
big = b'x' * (1 << 16)
for _ in range(40):
  os.write(fd, big)
os.write(fd, b'\\n')
for _ in range(1000):
  os.write(fd, b'?\\n')
sender.send(Kind.MESSAGE, text='after')
os.write(fd, b'{"kind":"mess')
""")
  events = watched.run()
  kinds = [event.kind for event in events]
  assert Kind.RUN_ENDED not in kinds
  texts = [event.data.get('text', '') for event in events]
  assert 'forged' not in texts
  assert 'before' in texts
  assert 'after' in texts
  warnings = [event for event in events if event.kind == Kind.WARNING]
  assert len(warnings) == 11
  assert any('longer than 1048576 bytes' in text for text in texts)
  assert 'dropped 1005 lines' in texts[-2]
  assert kinds[-1] == Kind.WORKER_EXITED


def test_a_flood_is_read_to_its_end(watch):
  watched = watch("""
for number in range(20_000):
  sender.send(Kind.MESSAGE, text=str(number))
os.kill(os.getpid(), signal.SIGKILL)
""")
  events = watched.run()
  assert [event.data['text'] for event in events[1:-1]] == [
    str(number) for number in range(20_000)
  ]


@pytest.mark.parametrize('holds_the_pipe', [True, False])
def test_children_die_with_the_worker(watch, holds_the_pipe):
  watched = watch(
    f'holds_the_pipe = {holds_the_pipe}'
    + """
if child := os.fork():
  sender.send(Kind.MESSAGE, text=str(child))
  os._exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not holds_the_pipe:
  os.close(fd)
time.sleep(600)
"""
  )
  _, message, last = watched.run()
  assert last.data['exit_code'] == 1
  _wait_until(lambda: _is_gone(int(message.data['text'])))


def test_a_child_that_floods_the_pipe_does_not_keep_the_end_back(watch):
  watched = watch("""
if os.fork():
  os._exit(1)
os.setsid()
deadline = time.monotonic() + 60
while time.monotonic() < deadline and sender.connected:
  sender.send(Kind.PROGRESS, done=0)
""")
  begun = time.monotonic()
  assert watched.run()[-1].data['exit_code'] == 1
  assert time.monotonic() < begun + 20


def test_a_worker_asked_to_end_may_take_its_time(watch):
  watched = watch("""
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
sender.send(Kind.MESSAGE, text='ready')
while not stop:
  time.sleep(0.01)
sender.send(Kind.MESSAGE, text='asked')
time.sleep(0.3)
sender.send(Kind.MESSAGE, text=f'asked {len(stop)} times')
sys.exit(13)
""")
  watched.agent.start(_assignment(1))
  watched.wait_for('ready')
  watched.agent.terminate()
  watched.wait_for('asked')
  watched.agent.terminate()
  watched.wait_for('asked 1 times')
  assert watched.next().data['exit_code'] == 13
  watched.agent.terminate()  # Of no effect, and no error.
  watched.agent.kill()


def test_a_worker_that_does_not_end_is_killed_and_reaped(watch):
  watched = watch("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sender.send(Kind.MESSAGE, text='ready')
time.sleep(600)
""")
  watched.agent.start(_assignment(1))
  watched.wait_for('ready')
  watched.agent.terminate()
  assert watched.agent.is_running()
  watched.agent.close()
  assert watched.next().data['exit_code'] == 128 + signal.SIGKILL
  assert not os.path.exists(f'/proc/{watched.pids[0]}')


def test_a_worker_that_cannot_be_started_is_a_failed_attempt(watch):
  watched = watch('', command=['/nowhere/python'])
  started, error, exited = watched.agent.start(_assignment(1))
  assert started.kind == Kind.WORKER_STARTED
  assert '/nowhere/python' in error.data['text']
  assert exited.data['exit_code'] == protocol.ExitCode.CRASHED


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT])
def test_a_start_without_space_is_a_full_disk(watch, monkeypatch, number):
  def refuse(*_, **__):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(subprocess, 'Popen', refuse)
  _, error, exited = watch('').agent.start(_assignment(1))
  assert error.data['exit_code'] == protocol.ExitCode.DISK_FULL
  assert exited.data['exit_code'] == protocol.ExitCode.DISK_FULL


def test_workers_of_one_host_have_numbers_logs_and_ends_of_their_own(watch):
  watched = watch(
    """
number = int(sys.argv[1].removeprefix('--process='))
print('flags', *sys.argv[1:4])
if number == 6:
  sender = reporter.Reporter(fd, 6)
  sender.send(Kind.MESSAGE, text='not worth telling twice')
  sender.send(Kind.ERROR, text='mine', exit_code=7, traceback='')
os._exit(number)
""",
    processes=2,
  )
  assignment = agent_lib.Assignment(3, 5, 8, '10.0.0.1:9', '')
  started = watched.agent.start(assignment)
  assert [event.data['process'] for event in started] == [5, 6]
  assert {event.data['processes'] for event in started} == {8}
  events = [watched.next() for _ in range(3)]
  exits = [e.data for e in events if e.kind == Kind.WORKER_EXITED]
  assert {e['process']: e['exit_code'] for e in exits} == {5: 5, 6: 6}
  (error,) = (e.data for e in events if e.kind == Kind.ERROR)
  assert error['process'] == 6
  with open(f'{watched.log_path}.1.1.1.1.1.1') as log:
    assert 'flags --process=6 --processes=8 --coordinator=10' in log.read()


def test_a_worker_that_closes_its_pipe_is_watched_to_its_end(watch):
  watched = watch('os.close(fd); time.sleep(0.5); os._exit(12)')
  assert watched.run()[-1].data['exit_code'] == 12


def test_lines_are_cut_at_any_chunk_boundary():
  stream = b'a\n\nbcd\nlonger\nef\ntoo long as well\n\nxyz\nrest'
  expected = [b'a', b'', b'bcd', None, b'ef', None, b'', b'xyz']
  for size in range(1, len(stream) + 1):
    splitter = worker_process.LineSplitter(max_line_bytes=4)
    lines = []
    for start in range(0, len(stream), size):
      lines += splitter.split(stream[start : start + size])
    assert lines == expected, size


def test_a_line_without_end_takes_no_memory():
  splitter = worker_process.LineSplitter(max_line_bytes=1000)
  for _ in range(1000):
    assert splitter.split(b'x' * 900) == []
    assert len(splitter._begun) <= 1000
  assert splitter.split(b'\nshort\n') == [None, b'short']
