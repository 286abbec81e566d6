"""A real run for tests: launcher and worker processes, observed by files."""

from collections.abc import Callable
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import jax

from launch.control import journal
from launch.control import protocol
from launch.control import workdir_lock

CONFIG = str(pathlib.Path(__file__).with_name('tiny_config.py'))
# Generous, for a machine that compiles everything anew under load.
_DEADLINE_S = 300.0


def write_corpus(directory: pathlib.Path) -> None:
  """Writes 12 texts of random words, always the same ones."""
  generator = random.Random(0)
  words = ['step', 'loss', 'kill', 'save', 'again', 'row', 'token', 'and', 'it']
  directory.mkdir()
  for number in range(12):
    text = ' '.join(generator.choices(words, k=400))
    (directory / f'{number:02}.txt').write_text(text)


def environment() -> dict[str, str]:
  """This process's, for a launcher; the first compilation takes a third."""
  flags = os.environ.get('XLA_FLAGS', '')
  return {
    **os.environ,
    'XLA_FLAGS': f'{flags} --xla_backend_optimization_level=0',
  }


def overrides(corpus: pathlib.Path) -> list[str]:
  """The flags of every run on a corpus."""
  cache = jax.config.jax_compilation_cache_dir
  return [
    f'--config={CONFIG}:{corpus}',
    f'--config.log.compilation_cache_dir={cache}',
  ]


class LaunchedRun:
  """The launches of one workdir, one after the other."""

  def __init__(self, workdir: pathlib.Path, corpus: pathlib.Path, *flags: str):
    """Starts nothing; `flags` belong to every launch."""
    self.workdir = workdir
    self.checkpoints = workdir / 'checkpoints'
    self._flags = [f'--workdir={workdir}', *overrides(corpus), *flags]
    self._launcher: subprocess.Popen | None = None

  def launch(self, *flags: str) -> None:
    """Starts the launcher, with more flags."""
    if self._launcher is not None:
      self._launcher.wait(timeout=_DEADLINE_S)
    # Files, for a pipe that nobody reads would stop the launcher.
    with (
      open(f'{self.workdir}.out', 'w') as out,
      open(f'{self.workdir}.err', 'w') as err,
    ):
      self._launcher = subprocess.Popen(
        [sys.executable, '-m', 'launch.main', *self._flags, *flags],
        stdout=out,
        stderr=err,
        env=environment(),
        start_new_session=True,
      )

  def finish(self) -> int:
    """Waits for the launcher's end and returns its exit code."""
    exit_code = self._launcher.wait(timeout=_DEADLINE_S)
    assert 'Traceback' not in self.output() + self.errors()
    return exit_code

  def signal_launcher(self, number: signal.Signals) -> None:
    self._launcher.send_signal(number)

  def signal_worker(self, number: signal.Signals) -> None:
    os.kill(self.events('worker_started')[-1].data['pid'], number)

  def close(self) -> None:
    """Leaves no process behind."""
    if self._launcher is not None and self._launcher.poll() is None:
      self._launcher.kill()
      self._launcher.wait()
      self.wait_until(lambda: not workdir_lock.is_locked(str(self.workdir)))

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Looks again and again, without a pause that could miss the moment."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
      assert time.monotonic() < deadline, self.output() + self.errors()
      time.sleep(0.001)

  def wait_for_step(self, step: int) -> None:
    """Returns once the step is logged; the launcher must be at work."""

    def is_logged():
      assert self._launcher.poll() is None, self.output() + self.errors()
      return self.logged_step() >= step

    self.wait_until(is_logged)

  def logged_step(self) -> int:
    try:
      return (self.workdir / 'metrics.jsonl').read_bytes().count(b'\n')
    except FileNotFoundError:
      return 0

  def values(self) -> list[str]:
    """Each step's reproducible values as text: equal text is equal bits."""
    lines = (self.workdir / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
      del record['timings']
    return [json.dumps(record) for record in records]

  def saved_steps(self) -> list[int]:
    names = [path.name for path in self.checkpoints.iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())

  def digests(self) -> dict[str, Any]:
    """Of the newest checkpoint's arrays."""
    newest = self.checkpoints / str(self.saved_steps()[-1])
    return json.loads((newest / 'metadata' / 'metadata').read_text())['digests']

  def events(self, kind: str) -> list[protocol.Event]:
    """The journal's events of a kind; of all launches, oldest first."""
    path = self.workdir / 'journal.sqlite'
    if not path.exists():
      return []
    return [event for event in journal.read(str(path)) if event.kind == kind]

  def exits(self) -> list[int]:
    return [event.data['exit_code'] for event in self.events('worker_exited')]

  def output(self) -> str:
    return pathlib.Path(f'{self.workdir}.out').read_text()

  def errors(self) -> str:
    return pathlib.Path(f'{self.workdir}.err').read_text()


def assert_same(run: LaunchedRun, undisturbed: LaunchedRun) -> None:
  """Asserts equal bits: of all logged values and of the final state."""
  assert run.values() == undisturbed.values()
  assert run.digests() == undisturbed.digests()
  assert not run.events('replay_mismatch')
  leftovers = [
    path.name
    for path in run.checkpoints.iterdir()
    if 'tmp' in path.name or path.name.endswith('.deleting')
  ]
  assert not leftovers
