"""One worker process: started, heard, and its end told.

It is a session of its own, so that a Ctrl-C at the terminal reaches it only
through `terminate`. It inherits two file descriptors: the write end of the
events pipe, whose last reader is this process (so the worker notices when the
launcher dies), and the lock of the workdir (so no second launcher starts while
any process of the first one lives).

A thread reads the pipe. It reports WORKER_EXITED when the process is gone, its
children are gone, and the pipe is empty: nothing of a worker arrives after its
end.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import Any

from launch.control import protocol

LOG_TAIL_LINES = 40


class WorkerProcess:
  """A worker that runs, or ran; call its methods from one thread."""

  def __init__(
    self,
    *,
    attempt: int,
    process: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: str,
    lock_fd: int,
    deliver: Callable[[protocol.Event], None],
  ):
    """Starts it.

    Args:
      attempt: number of the attempt that it belongs to.
      process: its number among the processes of the run.
      command: ` --events_fd=N` is appended.
      environment: added to this process's.
      log_path: the file that receives its stdout and stderr.
      lock_fd: a locked file that it keeps open.
      deliver: receives its events, in order, in another thread; it may block,
        which in time blocks the worker's `send`.

    Raises:
      OSError: the system could not start it.
    """
    self._attempt = attempt
    self._number = process
    self._log_path = log_path
    self._deliver = deliver
    self._terminated = False
    with open(log_path, 'ab') as log:
      stamp = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime())
      log.write(f'=== attempt {attempt}, {stamp} ===\n'.encode())
      log.flush()
      self._log_start = log.tell()
      read_fd, write_fd = os.pipe()
      try:
        self._process = subprocess.Popen(
          [*command, f'--events_fd={write_fd}'],
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          env={**os.environ, **environment},
          pass_fds=(write_fd, lock_fd),
          start_new_session=True,
        )
      except OSError:
        os.close(read_fd)
        raise
      finally:
        # Only the worker may hold the write end, or its end is never seen.
        os.close(write_fd)
    self._thread = threading.Thread(
      target=self._watch, args=(read_fd,), name='watch-worker', daemon=True
    )
    self._thread.start()

  @property
  def pid(self) -> int:
    """Its process id."""
    return self._process.pid

  def terminate(self) -> None:
    """Asks it to save and end (SIGTERM), once; it may take its time."""
    if not self._terminated:
      self._terminated = True
      self._process.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    """Kills it and its children now (SIGKILL)."""
    if self.is_running():
      _kill_group(self._process.pid)

  def is_running(self) -> bool:
    """Whether it lives."""
    return self._process.poll() is None

  def join(self) -> None:
    """Returns when its WORKER_EXITED is delivered."""
    self._thread.join()

  def _watch(self, read_fd: int) -> None:
    reported_error = False
    with open(read_fd, 'rb', buffering=0) as pipe:
      for event in _read_events(pipe, self._process):
        reported_error |= event.kind == protocol.EventKind.ERROR
        self._deliver(event)
    status = self._process.wait()
    # Data loaders and the like must not outlive it: they hold the lock.
    _kill_group(self._process.pid)
    exit_code = status if status >= 0 else 128 - status
    explained = reported_error or exit_code == protocol.ExitCode.DONE
    log_tail = '' if explained else _log_tail(self._log_path, self._log_start)
    self._deliver(
      worker_exited(self._attempt, self._number, exit_code, log_tail)
    )


class LineSplitter:
  r"""Cuts a stream into lines, and drops those that are too long.

  Example: with a limit of 4, the chunks b'ab', b'c\nlonger', b'\nd\n' give
  [], [b'abc'], [None, b'd'] (None for the dropped one).
  """

  def __init__(self, max_line_bytes: int):
    self._max_line_bytes = max_line_bytes
    self._begun = b''
    self._dropping = False

  def split(self, chunk: bytes) -> list[bytes | None]:
    """Takes the stream's next bytes, returns the lines that they complete."""
    *complete, begun = chunk.split(b'\n')
    lines = []
    for piece in complete:
      line = self._begun + piece
      self._begun = b''
      too_long = self._dropping or len(line) > self._max_line_bytes
      lines.append(None if too_long else line)
      self._dropping = False
    self._begun += begun
    if len(self._begun) > self._max_line_bytes:
      self._begun, self._dropping = b'', True
    return lines


# A worker that writes garbage is told on a few times, not a million.
_MAX_WARNINGS = 10
# How often to look whether the worker died while a child holds its pipe.
_POLL_MS = 200
# How long a dead worker's pipe is read while somebody keeps writing to it.
_DRAIN_S = 2.0

_FROM_WORKER = {
  protocol.EventKind.PHASE,
  protocol.EventKind.PROGRESS,
  protocol.EventKind.MESSAGE,
  protocol.EventKind.WARNING,
  protocol.EventKind.RESTORED,
  protocol.EventKind.CHECKPOINT_SAVED,
  protocol.EventKind.CHECKPOINT_DROPPED,
  protocol.EventKind.REPLAY_MISMATCH,
  protocol.EventKind.ERROR,
}


def _read_events(pipe, process: subprocess.Popen):
  """Yields what the worker sends, until it is dead and the pipe is empty."""
  splitter = LineSplitter(protocol.MAX_LINE_BYTES)
  num_malformed = 0
  for chunk in _read_chunks(pipe, process):
    for line in splitter.split(chunk):
      try:
        yield _decode(line)
      except ValueError as error:
        num_malformed += 1
        if num_malformed <= _MAX_WARNINGS:
          yield agent_event(
            protocol.EventKind.WARNING,
            text=f'dropped a line from the worker: {error}',
          )
  if num_malformed > _MAX_WARNINGS:
    yield agent_event(
      protocol.EventKind.WARNING,
      text=f'dropped {num_malformed} lines from the worker in all',
    )


def _read_chunks(pipe, process: subprocess.Popen):
  poll = select.poll()
  poll.register(pipe, select.POLLIN)
  died_at = None
  while True:
    readable = poll.poll(_POLL_MS)
    if died_at is None and process.poll() is not None:
      died_at = time.monotonic()
    elif died_at is not None and (
      not readable or time.monotonic() > died_at + _DRAIN_S
    ):
      return
    if readable:
      chunk = pipe.read(1 << 16)
      if not chunk:
        return
      yield chunk


def _decode(line: bytes | None) -> protocol.Event:
  if line is None:
    raise ValueError(f'longer than {protocol.MAX_LINE_BYTES} bytes')
  event = protocol.decode(line)
  if event.kind not in _FROM_WORKER or event.source != 'worker':
    raise ValueError(f'a worker does not send {event.kind}')
  return event


def _kill_group(pid: int) -> None:
  # PermissionError is how macOS says that only zombies are left.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(pid, signal.SIGKILL)


def _log_tail(path: str, start: int) -> str:
  """Reads the last lines that an attempt wrote, at most 64 KiB."""
  try:
    with open(path, 'rb') as log:
      end = log.seek(0, os.SEEK_END)
      log.seek(max(start, end - (1 << 16)))
      lines = log.read().decode(errors='replace').rstrip().splitlines()
  except OSError as error:
    return f'cannot read the log: {error}'
  return '\n'.join(lines[-LOG_TAIL_LINES:])


def worker_exited(
  attempt: int, process: int, exit_code: int, log_tail: str
) -> protocol.Event:
  """The event that ends a worker's life."""
  return agent_event(
    protocol.EventKind.WORKER_EXITED,
    attempt=attempt,
    process=process,
    exit_code=exit_code,
    log_tail=log_tail,
  )


def agent_event(kind: protocol.EventKind, **data: Any) -> protocol.Event:
  """An event that the agent tells, now."""
  return protocol.Event(kind, 'agent', time.time(), None, data)
