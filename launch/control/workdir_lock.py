"""Lets one launcher at a time, and the workers it leaves, use a workdir.

The lock belongs to an open file that the workers inherit, so it is free exactly
when the last process of a launch is gone, however they died.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time


class WorkdirLock:
  """An exclusive lock on a workdir, held while any heir of its `fd` lives."""

  def __init__(self, workdir: str):
    """Takes the lock.

    Args:
      workdir: an existing directory.

    Raises:
      ValueError: when another launcher, or a worker it left, holds it.
      OSError: when the lock file cannot be opened.
    """
    path = os.path.join(workdir, 'lock')
    self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    # `status` holds the lock for an instant to see whether it is free.
    for attempts_left in (2, 1, 0):
      if _try_lock(self.fd, path):
        return
      if attempts_left:
        time.sleep(0.1)
    owner = os.pread(self.fd, 4096, 0)
    os.close(self.fd)
    raise ValueError(_in_use(workdir, owner))

  def write_owner(self, worker_pids: list[int]) -> None:
    """Leaves word of who holds the lock, for the message to a second one."""
    owner = {
      'host': socket.gethostname(),
      'launcher_pid': os.getpid(),
      'worker_pids': worker_pids,
    }
    # Only the wording of a message depends on it: a full disk, which the next
    # checkpoint reports, must not end a run here.
    with contextlib.suppress(OSError):
      os.ftruncate(self.fd, 0)
      os.pwrite(self.fd, json.dumps(owner).encode(), 0)

  def release(self) -> None:
    """Gives the lock up, for this process."""
    os.close(self.fd)


def is_locked(workdir: str) -> bool:
  """Whether a launcher or a worker of this workdir lives.

  Raises:
    OSError: when the lock file cannot be opened.
  """
  path = os.path.join(workdir, 'lock')
  if not os.path.exists(path):
    return False
  fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  try:
    return not _try_lock(fd, path, fcntl.LOCK_SH)
  finally:
    os.close(fd)


def _try_lock(fd: int, path: str, mode: int = fcntl.LOCK_EX) -> bool:
  try:
    fcntl.flock(fd, mode | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
      raise
    raise ValueError(
      f'{path} cannot be locked ({error}): its file system has no locks; pass '
      'a --workdir on another one'
    ) from error
  return True


def _in_use(workdir: str, owner: bytes) -> str:
  try:
    fields = json.loads(owner)
    host, launcher, workers = (
      fields[key] for key in ('host', 'launcher_pid', 'worker_pids')
    )
    workers = ' '.join(map(str, workers))
  except (ValueError, KeyError, TypeError):
    return (
      f'{workdir} is in use by another process; wait for it to end, or pass '
      'another --workdir'
    )
  if host == socket.gethostname() and not _is_alive(launcher):
    return (
      f'{workdir} is in use by worker {workers}, which saves because its '
      f'launcher {launcher} died; try again in a few seconds, or '
      f'`kill -9 {workers}`'
    )
  return (
    f'{workdir} is in use by launcher {launcher} on {host}; wait for it to '
    f'end, stop it with `kill {launcher}`, or pass another --workdir'
  )


def _is_alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True
