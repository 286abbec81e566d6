"""Draws a run for its user, from events: a bar, lines, and what went wrong.

The control plane draws, not the worker, so the bar survives a worker's death.
On a terminal it is a tqdm bar; elsewhere (a file, a pipe) a plain line at most
every 10 s and at the end of each phase. Warnings and errors go to stderr.
"""

from collections.abc import Callable
import os
import sys
import time
from typing import Any
from typing import TextIO

import tqdm

from launch.control import protocol

LINE_INTERVAL_S = 10.0


class Console:
  """Shows one launch; use it from one thread."""

  def __init__(
    self,
    workdir: str,
    out: TextIO,
    err: TextIO,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Shows nothing yet.

    Args:
      workdir: as the user wrote it.
      out: gets the bar and messages; a terminal or not.
      err: gets warnings and errors.
      clock: seconds, for the pace of plain lines.
    """
    self._workdir = workdir
    self._out = out
    self._err = err
    self._clock = clock
    self._progress: _Bar | _Lines | None = None
    self._total = 0
    self._last_step: int | None = None
    self._how_it_ended = ''
    self._ended_attempt = 0
    self._log_path = protocol.worker_log(workdir, 0)
    self._log_tail = ''

  def show(self, event: protocol.Event) -> None:
    """Shows an event, if it is one for the user."""
    shower = _SHOWERS.get(event.kind)
    if shower is not None:
      shower(self, event)

  def close(self) -> None:
    """Ends the bar, so that the next line begins at the left."""
    if self._progress is not None:
      self._progress.close()
      self._progress = None

  def _on_run_started(self, event: protocol.Event) -> None:
    del event
    self._line(f'run in {self._workdir}, the worker logs to {self._log_path}')

  def _on_phase(self, event: protocol.Event) -> None:
    self.close()
    if event.data['unit'] == 'steps':
      self._tell_restart(event.data['start'])
    kind = _Bar if self._out.isatty() else _Lines
    self._progress = kind(self, event.data)
    self._total = event.data['total']

  def _on_progress(self, event: protocol.Event) -> None:
    if event.step is not None:
      self._last_step = event.step
    if self._progress is None:
      return
    self._progress.advance(event.data)
    if event.data['done'] >= self._total:
      # What comes next is said below the finished bar.
      self.close()

  def _on_message(self, event: protocol.Event) -> None:
    self._line(event.data['text'])

  def _on_warning(self, event: protocol.Event) -> None:
    self._line(f'warning: {event.data["text"]}', self._err)

  def _on_trouble(self, event: protocol.Event) -> None:
    what = event.kind.value.replace('_', ' ')
    where = '' if event.step is None else f' (step {event.step})'
    text = event.data.get('text', '')
    self._line(f'warning: {what}{where}: {text}'.rstrip(': '), self._err)

  def _on_restored(self, event: protocol.Event) -> None:
    if self._how_it_ended:
      self._tell_restart(event.step)
    else:
      self._line(f'continuing from step {event.step}')

  def _on_worker_exited(self, event: protocol.Event) -> None:
    if event.data['attempt'] == self._ended_attempt:
      return  # the first of the workers to end is the one to look at
    self._ended_attempt = event.data['attempt']
    self.close()
    process, exit_code = event.data['process'], event.data['exit_code']
    self._log_path = protocol.worker_log(self._workdir, process)
    self._log_tail = event.data['log_tail']
    self._how_it_ended = protocol.describe_exit(exit_code)
    if process > 0:
      self._how_it_ended = f'process {process} {self._how_it_ended}'
    if self._last_step is not None:
      self._how_it_ended += f' at step {self._last_step}'

  def _on_decision(self, event: protocol.Event) -> None:
    # The first start is not worth a line.
    if event.data['action'] != 'start_workers' or self._how_it_ended:
      self._line(event.data['text'], self._err)

  def _on_run_ended(self, event: protocol.Event) -> None:
    self.close()
    healthy = (protocol.ExitCode.DONE, protocol.ExitCode.PREEMPTED)
    if self._log_tail and event.data['exit_code'] not in healthy:
      indented = self._log_tail.replace('\n', '\n  ')
      self._line(f'the end of {self._log_path}:\n  {indented}', self._err)

  def _tell_restart(self, step: int | None) -> None:
    if self._how_it_ended:
      self._line(
        f'restarted the worker ({self._how_it_ended}); it continues from step '
        f'{step}'
      )
      self._how_it_ended = ''

  def _line(self, text: str, file: TextIO | None = None) -> None:
    write_line(text, self._out if file is None else file)


def write_line(text: str, file: TextIO) -> None:
  """Writes a line above the bar, if there is one.

  Args:
    text: without newline at its end; what the file cannot encode is escaped.
    file: a stream; when its reader is gone, the line is lost and nothing else.
  """
  encoding = file.encoding or 'utf-8'
  text = text.encode(encoding, 'backslashreplace').decode(encoding)
  with _Unbroken(file):
    # tqdm.write lifts the bar, writes, and draws the bar again below.
    tqdm.tqdm.write(text, file=file)
    file.flush()


# Without tqdm's own rate, which reads '9.96s/steps' below one a second.
_COUNT_FORMAT = (
  '{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]'
)


class _Bar:
  """A phase on a terminal."""

  def __init__(self, console: Console, phase: dict[str, Any]):
    in_bytes = phase['unit'] == 'bytes'
    self._file = console._out
    # Stays None when the terminal is gone.
    self._bar: tqdm.tqdm | None = None
    # tqdm's watching thread only serves loops that forget to update.
    tqdm.tqdm.monitor_interval = 0
    with _Unbroken(self._file):
      self._bar = tqdm.tqdm(
        desc=phase['name'],
        total=phase['total'],
        initial=phase['start'],
        unit='B' if in_bytes else phase['unit'],
        unit_scale=in_bytes,
        bar_format=None if in_bytes else _COUNT_FORMAT,
        file=self._file,
        dynamic_ncols=True,
      )

  def advance(self, data: dict[str, Any]) -> None:
    if self._bar is None:
      return
    with _Unbroken(self._file):
      self._bar.set_postfix_str(_figures(data), refresh=False)
      self._bar.update(data['done'] - self._bar.n)

  def close(self) -> None:
    if self._bar is None:
      return
    with _Unbroken(self._file):
      self._bar.refresh()
      self._bar.close()


class _Lines:
  """A phase where there is no terminal."""

  def __init__(self, console: Console, phase: dict[str, Any]):
    self._console = console
    self._phase = phase
    self._started_at = self._told_at = console._clock()
    self._latest: dict[str, Any] | None = None
    self._tell({'done': phase['start']})

  def advance(self, data: dict[str, Any]) -> None:
    self._latest = data
    if self._console._clock() - self._told_at >= LINE_INTERVAL_S:
      self._tell(data)

  def close(self) -> None:
    if self._latest is not None:
      self._tell(self._latest)

  def _tell(self, data: dict[str, Any]) -> None:
    now = self._console._clock()
    self._told_at, self._latest = now, None
    done, total = data['done'], self._phase['total']
    parts = [
      f'{self._phase["name"]}: {done}/{total} {self._phase["unit"]}',
      _figures(data),
    ]
    elapsed_s, moved = now - self._started_at, done - self._phase['start']
    if moved > 0:
      left_s = elapsed_s / moved * max(0, total - done)
      parts += [
        f'{tqdm.tqdm.format_interval(elapsed_s)} elapsed',
        f'{tqdm.tqdm.format_interval(left_s)} left',
      ]
    self._console._line(', '.join(part for part in parts if part))


class _Unbroken:
  """Keeps a run alive whose terminal or pipe is gone.

  `launch.main | head` closes stdout long before the training is done; the
  stream then leads nowhere, in this process and at its exit.
  """

  def __init__(self, file: TextIO):
    self._file = file

  def __enter__(self) -> None:
    return None

  def __exit__(self, kind, error, trace) -> bool:
    if not isinstance(error, OSError):
      return False
    if self._file in (sys.stdout, sys.stderr):
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self._file.fileno())
      os.close(nowhere)
    return True


def _figures(data: dict[str, Any]) -> str:
  """Formats the numbers of a PROGRESS: 'loss 2.31, 10.2k tokens/s'."""
  parts = []
  for key, value in data.items():
    if key == 'done' or isinstance(value, bool):
      continue
    if not isinstance(value, int | float):
      continue
    if key.endswith('_per_s'):
      rate = tqdm.tqdm.format_sizeof(value) if value < 1e15 else f'{value:g}'
      parts.append(f'{rate} {key.removesuffix("_per_s")}/s')
    else:
      parts.append(f'{key.replace("_", " ")} {value:.4g}')
  return ', '.join(parts)


_SHOWERS: dict[
  protocol.EventKind, Callable[[Console, protocol.Event], None]
] = {
  protocol.EventKind.RUN_STARTED: Console._on_run_started,
  protocol.EventKind.PHASE: Console._on_phase,
  protocol.EventKind.PROGRESS: Console._on_progress,
  protocol.EventKind.MESSAGE: Console._on_message,
  protocol.EventKind.WARNING: Console._on_warning,
  protocol.EventKind.CHECKPOINT_DROPPED: Console._on_trouble,
  protocol.EventKind.REPLAY_MISMATCH: Console._on_trouble,
  protocol.EventKind.RESTORED: Console._on_restored,
  protocol.EventKind.WORKER_EXITED: Console._on_worker_exited,
  protocol.EventKind.DECISION: Console._on_decision,
  protocol.EventKind.RUN_ENDED: Console._on_run_ended,
}
