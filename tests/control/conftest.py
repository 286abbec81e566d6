"""Starts real launchers whose worker is a few lines of Python."""

import contextlib
import subprocess
import sys

import pytest

from launch.control import journal
from launch.control import protocol

CONFIG = """
import ml_collections

def get_config(arg=None):
  return ml_collections.ConfigDict({
    'train': {'steps': 10, 'deterministic': True},
    'launch': {
      'max_restarts': 100, 'max_restarts_without_progress': 2,
      'backoff_s': 0.05, 'grace_s': 30.0, 'join_timeout_s': 20.0,
      'heartbeat_timeout_s': 20.0,
      'collective_timeout_s': 20.0, 'stuck_timeout_s': 60.0,
    },
  })
"""

LAUNCHER = """
import sys
from launch import main
sys.exit(main.run(sys.argv, [sys.executable, '-c', sys.argv.pop(1)]))
"""

# Counts its lives in the workdir, so that a test can give each another fate.
WORKER = """
import json, os, signal, sys, time
from launch.control import protocol
from launch.worker import reporter
Kind = protocol.EventKind
flags = dict(arg.removeprefix('--').split('=', 1) for arg in sys.argv[1:])
workdir, process = flags['workdir'], int(flags['process'])
sender = reporter.Reporter(int(flags['events_fd']), process)
lives = os.path.join(workdir, f'lives{process}')
with open(lives, 'a+') as file:
  file.write('x')
life = os.path.getsize(lives)
with open(os.path.join(workdir, 'config.json')) as file:
  config = json.load(file)
def train(first, last):
  sender.send(Kind.PHASE, name='train', total=10, unit='steps', start=first)
  for step in range(first + 1, last + 1):
    sender.send(Kind.PROGRESS, step=step, done=step, loss=1 / step)
def fail(text, exit_code):
  sender.send(Kind.ERROR, text=text, exit_code=exit_code, traceback='')
  os._exit(exit_code)
def wait_for_stop(seconds):
  deadline = time.monotonic() + seconds
  while not stopped and sender.connected and time.monotonic() < deadline:
    time.sleep(0.01)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
"""


class Launch:
  """A launcher process whose worker runs `source`."""

  def __init__(self, directory, source, *arguments, patch=''):
    self.workdir = directory / 'run'
    config = directory / 'config.py'
    config.write_text(CONFIG)
    self.output = ''
    self.process = subprocess.Popen(
      [
        *(sys.executable, '-c', patch + LAUNCHER, WORKER + source),
        *(f'--config={config}', f'--workdir={self.workdir}', *arguments),
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def finish(self):
    """Waits for the launcher's end and returns its exit code."""
    self.output += self.process.communicate(timeout=30)[0]
    assert 'Traceback' not in self.output
    return self.process.returncode

  def read_until(self, text):
    """Reads the launcher's output up to a line that contains `text`."""
    while text not in self.output:
      line = self.process.stdout.readline()
      assert line, self.output
      self.output += line

  def events(self, kind):
    events = journal.read(str(self.workdir / 'journal.sqlite'))
    return [event for event in events if event.kind == kind]

  def worker_pid(self):
    return self.events(protocol.EventKind.WORKER_STARTED)[-1].data['pid']

  def exits(self):
    events = self.events(protocol.EventKind.WORKER_EXITED)
    return [event.data['exit_code'] for event in events]


@pytest.fixture
def launch(tmp_path):
  with contextlib.ExitStack() as stack:

    def start(source, *arguments, patch=''):
      launched = Launch(tmp_path, source, *arguments, patch=patch)
      stack.callback(launched.process.stdout.close)
      stack.callback(launched.process.wait)
      stack.callback(launched.process.kill)
      return launched

    yield start


@pytest.fixture
def config_path(tmp_path):
  """A config file that `launch` and `main.run` accept."""
  path = tmp_path / 'config.py'
  path.write_text(CONFIG)
  return path
