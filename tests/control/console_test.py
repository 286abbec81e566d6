"""What the user sees: a bar on a terminal, a few lines elsewhere."""

import io
import os
import sys

import pytest

from launch.control import console as console_lib
from launch.control import protocol

Kind = protocol.EventKind


class Terminal(io.StringIO):
  """A stream that says it is a terminal."""

  def isatty(self):
    return True


class Screen:
  """A console with streams to look at and a clock to turn."""

  def __init__(self, out):
    self.out, self.err, self.now = out, io.StringIO(), 0.0
    self.attempt = 0
    self.console = console_lib.Console(
      'runs/x', self.out, self.err, clock=lambda: self.now
    )

  def tell(self, kind, step=None, **data):
    self.console.show(protocol.Event(kind, 'worker', self.now, step, data))

  def begin(self, name='train', total=100, unit='steps', start=0):
    self.tell(Kind.PHASE, name=name, total=total, unit=unit, start=start)

  def exit(self, exit_code, log_tail=''):
    self.attempt += 1
    self.tell(
      Kind.WORKER_EXITED,
      attempt=self.attempt,
      process=0,
      exit_code=exit_code,
      log_tail=log_tail,
    )


def test_plain_lines_come_every_10_s_and_at_the_end_of_a_phase():
  screen = Screen(io.StringIO())
  screen.begin()
  for step in range(1, 26):
    screen.now += 1.0
    screen.tell(Kind.PROGRESS, step=step, done=step, loss=2.5)
  screen.begin('evaluate', 10, 'documents')
  lines = screen.out.getvalue().splitlines()
  assert lines == [
    'train: 0/100 steps',
    'train: 10/100 steps, loss 2.5, 00:10 elapsed, 01:30 left',
    'train: 20/100 steps, loss 2.5, 00:20 elapsed, 01:20 left',
    'train: 25/100 steps, loss 2.5, 00:25 elapsed, 01:15 left',
    'evaluate: 0/10 documents',
  ]


def test_a_terminal_gets_a_bar_with_messages_above_it():
  screen = Screen(Terminal())
  screen.begin()
  screen.tell(Kind.PROGRESS, step=50, done=50, loss=2.5, tokens_per_s=12345.6)
  screen.tell(Kind.MESSAGE, text='halfway')
  screen.tell(Kind.PROGRESS, step=60, done=60, loss=2.25)
  screen.console.close()
  drawn = screen.out.getvalue()
  assert 'halfway\n' in drawn
  last = drawn.rstrip('\n').rsplit('\r', 1)[-1]
  assert 'train:  60%' in last
  assert '60/100' in last
  assert 'loss 2.25' in last
  assert drawn.endswith('\n')


def test_a_resumed_bar_starts_where_the_run_does():
  screen = Screen(Terminal())
  screen.begin(start=40)
  assert '40/100' in screen.out.getvalue()


@pytest.mark.parametrize('restored', [True, False])
def test_one_line_tells_a_restart_and_where_it_continues(restored):
  screen = Screen(io.StringIO())
  screen.begin()
  screen.tell(Kind.PROGRESS, step=37, done=37)
  screen.exit(137)
  if restored:
    screen.tell(Kind.RESTORED, step=30)
  screen.begin(start=30)
  told = [
    line for line in screen.out.getvalue().splitlines() if 'SIGKILL' in line
  ]
  assert told == [
    'restarted the worker (killed by SIGKILL at step 37); it continues from '
    'step 30'
  ]


def test_a_decision_to_start_is_told_from_the_second_on():
  screen = Screen(io.StringIO())
  screen.tell(Kind.DECISION, action='start_workers', text='first start')
  assert not screen.err.getvalue()
  screen.exit(1)
  screen.tell(Kind.DECISION, action='start_workers', text='second start')
  assert screen.err.getvalue() == 'second start\n'


def test_a_failed_run_shows_the_end_of_the_log():
  screen = Screen(io.StringIO())
  screen.exit(1, log_tail='Traceback\nBoom: it broke')
  screen.tell(Kind.RUN_ENDED, exit_code=14, text='gave up')
  assert screen.err.getvalue() == (
    'the end of runs/x/worker.log:\n  Traceback\n  Boom: it broke\n'
  )


def test_warnings_go_to_stderr():
  screen = Screen(io.StringIO())
  screen.tell(Kind.WARNING, text='careful')
  screen.tell(Kind.REPLAY_MISMATCH, step=7, text='loss 2.5, before 2.4')
  assert not screen.out.getvalue()
  assert screen.err.getvalue().splitlines() == [
    'warning: careful',
    'warning: replay mismatch (step 7): loss 2.5, before 2.4',
  ]


@pytest.mark.parametrize('stream', [io.StringIO, Terminal])
def test_any_numbers_can_be_drawn(stream):
  screen = Screen(stream())
  for total, done in ((0, 0), (0, 5), (10, 2**62), (10, 5)):
    screen.begin(total=total)
    screen.now += 60
    for value in (float('nan'), float('inf'), 10**300, 0, -1.5):
      screen.tell(
        Kind.PROGRESS, done=done, loss=value, tokens_per_s=value, note='text'
      )
  screen.console.close()


class Pipe(io.TextIOWrapper):
  """A pipe that may say it is a terminal."""

  terminal = False

  def isatty(self):
    return self.terminal


@pytest.mark.parametrize('terminal', [True, False])
@pytest.mark.parametrize('begun', [True, False])
def test_a_reader_that_leaves_does_not_end_the_run(
  monkeypatch, terminal, begun
):
  read_fd, write_fd = os.pipe()
  with Pipe(open(write_fd, 'wb')) as out:
    out.terminal = terminal
    monkeypatch.setattr(sys, 'stdout', out)
    screen = Screen(out)
    if begun:
      screen.begin()
    os.close(read_fd)
    screen.begin()
    screen.now += 60
    screen.tell(Kind.PROGRESS, step=1, done=1)
    screen.tell(Kind.MESSAGE, text='lost')
    screen.console.close()


def test_what_a_stream_cannot_encode_is_escaped():
  raw = io.BytesIO()
  file = io.TextIOWrapper(raw, encoding='ascii')
  console_lib.write_line('caf\u00e9 \ud800', file)
  assert raw.getvalue() == b'caf\\xe9 \\ud800\n'
