"""The log of a run: one JSON line per step, written once, compared on replay.

After a crash a run repeats the steps since its last checkpoint. Their lines are
there already: each repeated step must give the very same values, and a
difference is reported rather than overwritten. Where the steps ran on another
layout of devices, whose sums round otherwise, the losses must be close.
"""

from collections.abc import Callable
import json
import math
import os
from typing import Any

from launch.worker import durable

# `mismatch(step, key, old, new)`: a repeated step gave another value; None
# where one of the two attempts has no such value.
Mismatch = Callable[[int, str, float | None, float | None], None]

# Between two layouts, for a few repeated steps: 50 steps agree to 1e-5
# (tests/sharding_test.py).
_LOSS_TOLERANCE = 1e-4
_LOSSES = ('loss', 'validation_loss')


class MetricLog:
  """Appends to a file that no other process writes."""

  def __init__(
    self, path: str, layout: str, first_step: int, mismatch: Mismatch
  ):
    """Opens the file at the step that training goes on from.

    Args:
      path: the file; made if it is missing.
      layout: names the order of the run's sums, as `program.layout` does.
      first_step: the step of the first `write`.
      mismatch: called when a repeated step differs.

    Raises:
      ValueError: the file is not the log of the steps before `first_step`.
      OSError: it cannot be read or written.
    """
    self._layout = layout
    self._mismatch = mismatch
    self._next_step = first_step
    _cut_partial_line(path)
    # Power loss takes a new file whose name is not on the disk.
    durable.sync(os.path.dirname(path))
    records = read(path)
    _check_joins(path, records, first_step)
    self._logged = {
      record['step']: record
      for record in records
      if record['step'] >= first_step
    }
    self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

  def write(
    self, step: int, values: dict[str, float], timings: dict[str, float]
  ) -> None:
    """Logs a step, or compares it where an earlier attempt logged it.

    Args:
      step: follows the step of the last call.
      values: what the same run always gives (`loss`, ...).
      timings: what differs from run to run (`tokens_per_s`, ...).

    Raises:
      OSError: the line was not written (a full disk, say).
    """
    assert step == self._next_step, f'step {step} after {self._next_step - 1}'
    floats = {key: float(value) for key, value in values.items()}
    old = self._logged.pop(step, None)
    if old is None:
      timed = {key: float(value) for key, value in timings.items()}
      record = {
        'step': step,
        **floats,
        'layout': self._layout,
        'timings': timed,
      }
      self._append(f'{json.dumps(record)}\n'.encode())
    else:
      self._compare(step, old, floats)
    self._next_step = step + 1

  def sync(self) -> None:
    """Waits until every line is on the disk, safe from power loss.

    Raises:
      OSError: it is not.
    """
    os.fsync(self._file)

  def close(self) -> None:
    """Closes the file; the kernel has every line since its `write`."""
    os.close(self._file)

  def _append(self, line: bytes) -> None:
    size = os.fstat(self._file).st_size
    try:
      while line:
        line = line[os.write(self._file, line) :]
    except OSError:
      # A full disk may take a part of the line.
      os.ftruncate(self._file, size)
      raise

  def _compare(self, step, old, new):
    same_layout = old.get('layout') == self._layout
    for key in dict.fromkeys((*old, *new)):
      if key in ('step', 'layout', 'timings'):
        continue
      before, after = old.get(key), new.get(key)
      # As text: NaN equals itself, 0.0 is not -0.0.
      if repr(before) == repr(after):
        continue
      if same_layout or (key in _LOSSES and not _is_close(before, after)):
        self._mismatch(step, key, before, after)


def read(path: str) -> list[dict[str, Any]]:
  """The records of a log, in step order.

  Returns:
    `[{'step': 1, 'loss': 5.5, ..., 'layout': '1x1x1 ...', 'timings':
    {'step_s': 0.1, ...}}, ...]`; a last line that is being written right now
    is left out.

  Raises:
    ValueError: a line is no record, or not the step after the one before it.
    OSError: the file cannot be read.
  """
  with open(path, 'rb') as stream:
    *lines, _ = stream.read().split(b'\n')
  records = []
  for number, line in enumerate(lines, 1):
    record = _parse(line)
    if record is None:
      raise _damaged(path, number, 'is no record of a step')
    if records and record['step'] != records[-1]['step'] + 1:
      raise _damaged(
        path, number, f'is step {record["step"]} after {records[-1]["step"]}'
      )
    records.append(record)
  return records


def _is_close(before: float | None, after: float | None) -> bool:
  if before is None or after is None:
    return False
  return math.isclose(before, after, rel_tol=_LOSS_TOLERANCE)


def _parse(line: bytes) -> dict[str, Any] | None:
  try:
    record = json.loads(line)
  except ValueError:
    return None
  if not isinstance(record, dict) or type(record.get('step')) is not int:
    return None
  return record


def _cut_partial_line(path: str) -> None:
  """Cuts off what a kill left of a last line; makes the file if missing."""
  with open(path, 'a+b') as file:
    end = file.seek(0, os.SEEK_END)
    while end and os.pread(file.fileno(), 1, end - 1) != b'\n':
      start = max(end - 4096, 0)
      last = os.pread(file.fileno(), end - start, start).rfind(b'\n')
      end = start if last < 0 else start + last + 1
    file.truncate(end)


def _check_joins(
  path: str, records: list[dict[str, Any]], first_step: int
) -> None:
  """Raises where steps are missing; runs begin at step 0 or 1."""
  if records and (first := records[0]['step']) > 1:
    raise _damaged(path, 1, f'is step {first}, where step 0 or 1 should be')
  last = records[-1]['step'] if records else min(first_step - 1, 0)
  if last < first_step - 1:
    raise _damaged(
      path,
      len(records) + 1,
      f'is missing: it ends at step {last}, and training goes on at step'
      f' {first_step}',
    )


def _damaged(path: str, number: int, problem: str) -> ValueError:
  return ValueError(
    f'{path}: line {number} {problem}. Put back a copy of the file, or begin'
    ' anew in another workdir'
  )
