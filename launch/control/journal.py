"""The event log of a workdir: SQLite, one writer, written before it acts.

Everything the control plane knows about a run is a fold over this log, so a
launcher that starts again continues where the last one was. `status` and
anybody's `sqlite3 journal.sqlite 'select * from events'` may read while a run
writes.

Progress is thinned: one event in 10 s, and the last before a worker ends or
begins another phase.
"""

from collections.abc import Sequence
import errno
import json
import os
import sqlite3

from launch.control import protocol

PROGRESS_INTERVAL_S = 10.0


class Journal:
  """The log's only writer; use it from one thread."""

  def __init__(self, path: str):
    """Opens the log, or creates it.

    Args:
      path: the file.

    Raises:
      ValueError: when the file is no journal, or a damaged one.
      OSError: when it cannot be written; errno.ENOSPC when the disk is full.
    """
    self._path = path
    self._last_progress_s = -float('inf')
    self._pending_progress: protocol.Event | None = None
    self._connection = _connect(path, mode='rwc')
    try:
      # A rollback journal, not a write-ahead log, which needs shared memory
      # and so does not work on network file systems.
      self._connection.execute('PRAGMA journal_mode=DELETE')
      self._connection.execute('PRAGMA synchronous=FULL')
      with self._connection:
        self._connection.execute(_SCHEMA)
      self._connection.execute('SELECT id, step FROM events LIMIT 1')
    except sqlite3.Error as error:
      self._connection.close()
      raise _translated(error, path) from error

  def append(self, events: Sequence[protocol.Event]) -> None:
    """Writes events, in one transaction that is on the disk when this returns.

    Args:
      events: in order; PROGRESS is thinned (see the module docstring).

    Raises:
      OSError: when they cannot be written; errno.ENOSPC when the disk is full.
    """
    kept = [kept for event in events for kept in self._thinned(event)]
    if not kept:
      return
    rows = [
      (
        event.time_s,
        event.source,
        event.kind.value,
        event.step,
        json.dumps(event.data),
      )
      for event in kept
    ]
    try:
      with self._connection:
        self._connection.executemany(_INSERT, rows)
    except sqlite3.Error as error:
      translated = _translated(error, self._path)
      if not isinstance(translated, OSError):
        # It was a journal when it was opened: somebody removed or overwrote it.
        translated = OSError(errno.EIO, str(error), self._path)
      raise translated from error

  def read_all(self) -> tuple[protocol.Event, ...]:
    """Reads every event, oldest first.

    Raises:
      ValueError: when the file is damaged.
      OSError: when it cannot be read.
    """
    return _read(self._connection, self._path)

  def close(self) -> None:
    """Closes the file; nothing is lost without it."""
    self._connection.close()

  def _thinned(self, event: protocol.Event) -> list[protocol.Event]:
    if event.kind == protocol.EventKind.PROGRESS:
      # abs: a clock that was set back must not mute the log until it catches
      # up.
      if abs(event.time_s - self._last_progress_s) < PROGRESS_INTERVAL_S:
        self._pending_progress = event
        return []
      self._last_progress_s = event.time_s
      self._pending_progress = None
      return [event]
    if event.kind in _ENDS_PROGRESS and self._pending_progress is not None:
      last, self._pending_progress = self._pending_progress, None
      self._last_progress_s = last.time_s
      return [last, event]
    return [event]


def read(path: str) -> tuple[protocol.Event, ...]:
  """Reads a journal that another process may be writing.

  Args:
    path: the file.

  Returns:
    Every event, oldest first.

  Raises:
    ValueError: when the file is no journal, or a damaged one.
    OSError: when it cannot be read.
  """
  if not os.path.exists(path):
    raise ValueError(f'{path} does not exist: no run was started there')
  # Writable where possible: after a power cut the first reader must roll the
  # unfinished transaction back.
  connection = _connect(path, 'rw' if os.access(path, os.W_OK) else 'ro')
  try:
    return _read(connection, path)
  finally:
    connection.close()


_SCHEMA = """CREATE TABLE IF NOT EXISTS events(
  id INTEGER PRIMARY KEY,
  time_s REAL NOT NULL,
  source TEXT NOT NULL,
  kind TEXT NOT NULL,
  step INTEGER,
  data TEXT NOT NULL)"""

_INSERT = (
  'INSERT INTO events(time_s, source, kind, step, data) VALUES (?, ?, ?, ?, ?)'
)

_ENDS_PROGRESS = {
  protocol.EventKind.PHASE,
  protocol.EventKind.ERROR,
  protocol.EventKind.WORKER_EXITED,
  protocol.EventKind.RUN_ENDED,
}

# How long a writer waits for a reader's lock, and the other way round.
_BUSY_TIMEOUT_S = 60.0


def _connect(path: str, mode: str) -> sqlite3.Connection:
  address = f'file:{_quoted(os.path.abspath(path))}?mode={mode}'
  try:
    return sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S)
  except sqlite3.Error as error:
    raise _translated(error, path) from error


def _quoted(path: str) -> str:
  # The three characters that mean something in SQLite's URI file names.
  return path.replace('%', '%25').replace('?', '%3f').replace('#', '%23')


def _read(
  connection: sqlite3.Connection, path: str
) -> tuple[protocol.Event, ...]:
  try:
    rows = connection.execute(
      'SELECT time_s, source, kind, step, data FROM events ORDER BY id'
    ).fetchall()
  except sqlite3.Error as error:
    raise _translated(error, path) from error
  try:
    return tuple(
      protocol.Event(
        protocol.EventKind(kind), source, time_s, step, json.loads(data)
      )
      for time_s, source, kind, step, data in rows
    )
  except ValueError as error:
    raise _broken(path, error) from error


def _translated(error: sqlite3.Error, path: str) -> Exception:
  # Errors that sqlite3 itself raises carry no code.
  name = getattr(error, 'sqlite_errorname', '')
  if name.startswith('SQLITE_FULL'):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
  if name.startswith(('SQLITE_READONLY', 'SQLITE_PERM')):
    return OSError(errno.EACCES, os.strerror(errno.EACCES), path)
  if name.startswith('SQLITE_IOERR'):
    # SQLite keeps the system's error to itself; a used up quota is one.
    hint = 'is the disk full, or a quota used up?'
    return OSError(errno.EIO, f'{error} ({hint})', path)
  if name.startswith('SQLITE_BUSY'):
    return OSError(errno.EIO, str(error), path)
  return _broken(path, error)


def _broken(path: str, error: Exception) -> ValueError:
  return ValueError(
    f'{path} is not a readable journal ({error}); move it away to begin a new '
    'one, or pass another --workdir'
  )
