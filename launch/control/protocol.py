"""What the control plane and the workers say to each other.

A worker sends events to its agent, one JSON object per line, over a pipe that
it inherits; it says how it ended by its exit code. Nothing else crosses.

What `data` holds, by kind (further keys are allowed, a reader ignores those it
does not know):

  RUN_STARTED         launcher_pid, num_cores
  CONTROLLER_STARTED  pid: of a controller that goes on with the launch of one
                      that died
  HOST_JOINED         place ('host 2' or 'standby ...'), processes, where
  HOST_LOST           place, text
  WORKER_STARTED      attempt, process, processes, pid; optional how: 'fresh',
                      'spare' or 'in place'
  WORKER_WAITING      attempt, process, text: it lost the others, dropped its
                      devices, and may join the next attempt as it is
  HEARTBEAT           attempt, process, dispatched: the last step that it has
                      handed to its devices
  PHASE               name, total, unit, start: a new progress bar begins
  PROGRESS            done; optional numbers such as loss, tokens_per_s, step_s,
                      and stall_s: seconds in which the step waited for a
                      checkpoint
  MESSAGE, WARNING    text: one line for the user
  RESTORED            step is the step that training continues from; optional
                      source: 'memory', 'peer' or 'disk'
  CHECKPOINT_SAVED    step is the step that was saved
  CHECKPOINT_DROPPED  optional text: why a saved step is not used
  ANOMALY             name, text: a number that is not as it should be
  REPLAY_MISMATCH     optional text: how a repeated step logged another value
  ERROR               process, text (one line), exit_code, traceback ('' if
                      none)
  WORKER_EXITED       attempt, process, exit_code (128 + n for signal n),
                      log_tail
  DECISION            action, text
  RUN_ENDED           exit_code, text
"""

import dataclasses
import enum
import json
import os
import signal
from typing import Any

# A longer line is no event: the reader drops it and says so.
MAX_LINE_BYTES = 1 << 20


class ExitCode(enum.IntEnum):
  """How a worker, or a whole run, ended.

  Restarting heals CRASHED, PREEMPTED, PEER_LOST, HOST_LOST and signals; every
  other code would only come back, so the run ends with it at once.
  """

  # The work is complete.
  DONE = 0
  # An unexpected exception. Healable: the cause may be the machine's.
  CRASHED = 1
  # A setting, a path or the data is wrong. Not healable.
  USER_ERROR = 2
  # The loss or the gradients are NaN or infinite. Not healable: a restart
  # replays the same steps.
  NOT_FINITE = 10
  # The model and its batch do not fit in memory. Not healable.
  OUT_OF_MEMORY = 11
  # The workdir's disk is full. Not healable until someone frees space.
  DISK_FULL = 12
  # Asked to stop (SIGTERM, Ctrl-C). A worker that says so unasked is restarted;
  # a launcher that was asked ends with it.
  PREEMPTED = 13
  # The launcher's: several attempts in a row got no further than the best one.
  NO_PROGRESS = 14
  # The launcher's: as many restarts as the config allows were used up.
  RETRIES_EXHAUSTED = 15
  # Another process of the run died or hung, and this one could not go on.
  # Healable: all of them are started again.
  PEER_LOST = 16
  # A host of the run stopped answering or left. Healable: it may come back.
  HOST_LOST = 17


class EventKind(enum.StrEnum):
  """What an event tells; the payload of each is in the module docstring."""

  RUN_STARTED = 'run_started'
  CONTROLLER_STARTED = 'controller_started'
  HOST_JOINED = 'host_joined'
  HOST_LOST = 'host_lost'
  WORKER_STARTED = 'worker_started'
  WORKER_WAITING = 'worker_waiting'
  HEARTBEAT = 'heartbeat'
  PHASE = 'phase'
  PROGRESS = 'progress'
  MESSAGE = 'message'
  WARNING = 'warning'
  RESTORED = 'restored'
  CHECKPOINT_SAVED = 'checkpoint_saved'
  CHECKPOINT_DROPPED = 'checkpoint_dropped'
  ANOMALY = 'anomaly'
  REPLAY_MISMATCH = 'replay_mismatch'
  ERROR = 'error'
  WORKER_EXITED = 'worker_exited'
  DECISION = 'decision'
  RUN_ENDED = 'run_ended'


@dataclasses.dataclass(frozen=True)
class Event:
  """One thing that happened.

  Attributes:
    kind: what happened.
    source: who says so, 'worker', 'agent' or 'controller'.
    time_s: when, in seconds since 1970.
    step: the optimizer step it belongs to, if it belongs to one.
    data: JSON values, by kind (see the module docstring).
  """

  kind: EventKind
  source: str
  time_s: float
  step: int | None
  data: dict[str, Any]


def encode(event: Event) -> bytes:
  r"""Writes an event as one JSON line.

  Args:
    event: its `data` holds JSON values; NaN and infinities are written the way
      Python's json module reads them back.

  Returns:
    One line, e.g. b'{"kind":"progress",...,"data":{"done":3}}\n'.

  Raises:
    TypeError: when `data` holds what JSON cannot (an array, say).
    ValueError: when `data` lacks a key of its kind (see the module docstring).
  """
  _check_payload(event.kind, event.data)
  fields = {
    'kind': event.kind.value,
    'source': event.source,
    'time_s': event.time_s,
    'step': event.step,
    'data': event.data,
  }
  return json.dumps(fields, separators=(',', ':')).encode() + b'\n'


def decode(line: bytes) -> Event:
  """Reads what `encode` wrote.

  Args:
    line: one line, with or without its newline.

  Returns:
    The event.

  Raises:
    ValueError: when the line is no event.
  """
  try:
    fields = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not a JSON line: {_shown(line)}') from error
  if not isinstance(fields, dict) or set(fields) != _FIELDS:
    raise ValueError(f'not an event: {_shown(line)}')
  try:
    kind = EventKind(fields['kind'])
  except ValueError as error:
    raise ValueError(f'unknown kind of event: {_shown(line)}') from error
  step, time_s = fields['step'], fields['time_s']
  if not (
    isinstance(fields['source'], str)
    and _is_number(time_s)
    and abs(time_s) < 1e12  # False for NaN, too.
    and (step is None or _is_a(step, int))
    and isinstance(fields['data'], dict)
  ):
    raise ValueError(f'event with a field of a wrong type: {_shown(line)}')
  _check_payload(kind, fields['data'])
  return Event(kind, fields['source'], float(time_s), step, fields['data'])


def describe_exit(exit_code: int) -> str:
  """Names an exit code for a reader: 'killed by SIGKILL', 'out of memory'.

  Args:
    exit_code: as a shell reports it, 128 + n for death by signal n.

  Returns:
    A few words that fit after 'the worker ended:'.
  """
  if exit_code > 128:
    try:
      return f'killed by {signal.Signals(exit_code - 128).name}'
    except ValueError:
      return f'exit code {exit_code}'
  try:
    return ExitCode(exit_code).name.lower().replace('_', ' ')
  except ValueError:
    return f'exit code {exit_code}'


def worker_log(workdir: str, process: int) -> str:
  """The file with a worker's stdout and stderr."""
  name = 'worker.log' if process == 0 else f'worker.{process}.log'
  return os.path.join(workdir, name)


_FIELDS = {'kind', 'source', 'time_s', 'step', 'data'}

# The keys that a reader relies on, and their types; integers are counts.
_PAYLOADS = {
  EventKind.PHASE: {'name': str, 'total': int, 'unit': str, 'start': int},
  EventKind.PROGRESS: {'done': int},
  EventKind.MESSAGE: {'text': str},
  EventKind.WARNING: {'text': str},
  EventKind.ERROR: {
    'process': int,
    'text': str,
    'exit_code': int,
    'traceback': str,
  },
  EventKind.HOST_JOINED: {'place': str, 'processes': int, 'where': str},
  EventKind.HOST_LOST: {'place': str, 'text': str},
  EventKind.CONTROLLER_STARTED: {'pid': int},
  EventKind.WORKER_STARTED: {'attempt': int, 'process': int, 'processes': int},
  EventKind.WORKER_WAITING: {'attempt': int, 'process': int, 'text': str},
  EventKind.HEARTBEAT: {'attempt': int, 'process': int, 'dispatched': int},
  EventKind.ANOMALY: {'name': str, 'text': str},
  EventKind.WORKER_EXITED: {
    'attempt': int,
    'process': int,
    'exit_code': int,
    'log_tail': str,
  },
  EventKind.DECISION: {'action': str, 'text': str},
  EventKind.RUN_ENDED: {'exit_code': int, 'text': str},
}


def _check_payload(kind: EventKind, data: dict[str, Any]) -> None:
  for key, key_type in _PAYLOADS.get(kind, {}).items():
    value = data.get(key)
    if not _is_a(value, key_type) or (key_type is int and value < 0):
      raise ValueError(
        f'a {kind} event needs data[{key!r}] of type {key_type.__name__}, '
        f'not {value!r:.100}'
      )


def _is_number(value: Any) -> bool:
  return _is_a(value, int) or isinstance(value, float)


def _is_a(value: Any, expected: type) -> bool:
  # True is an int to Python, but not a count; nor is what SQLite cannot store.
  if isinstance(value, bool) or not isinstance(value, expected):
    return False
  return not isinstance(value, int) or abs(value) < 2**63


def _shown(line: bytes) -> str:
  return repr(line[:100]) + ('...' if len(line) > 100 else '')
