"""Files that are complete or absent, and locks that die with their holder."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import errno
import fcntl
import json
import os
from typing import Any

# How long work speaks to its user: `report(name, done, total, unit)` as it goes
# on, a new name for each piece of work; `tell(line)` once in a while.
Report = Callable[[str, int, int, str], None]
Tell = Callable[[str], None]


def write_json(file: str, content: Any) -> None:
  """Writes a file that is either complete or absent, even after power loss."""
  temporary = f'{file}.tmp'
  with open(temporary, 'w', encoding='utf-8') as stream:
    json.dump(content, stream)
  publish(temporary, file)


def publish(temporary: str, file: str) -> None:
  """Renames a written file once its bytes are on the disk."""
  sync(temporary)
  os.replace(temporary, file)
  sync(os.path.dirname(file))


def read_json(file: str) -> Any:
  """The content of a JSON file; None where there is none."""
  try:
    with open(file, encoding='utf-8') as stream:
      return json.load(stream)
  except (FileNotFoundError, NotADirectoryError):
    return None
  except ValueError as error:
    raise ValueError(f'{file} is damaged ({error}); delete it.') from error


@contextlib.contextmanager
def locked(path: str, tell: Tell) -> Iterator[None]:
  """Holds `path` (made as a directory) for this process alone.

  The kernel drops the lock with the process, however that ends.

  Raises:
    ValueError: the directory cannot be made or written.
  """
  refused = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
  try:
    os.makedirs(path, exist_ok=True)
    lock = open(f'{path}.lock', 'a')  # noqa: SIM115 (closed below)
  except OSError as error:
    if error.errno not in (*refused, errno.EEXIST):
      raise
    raise ValueError(
      f'data.cache_dir {os.path.dirname(path)} cannot be written: '
      f'{error.strerror}; set it to a directory of yours.'
    ) from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      tell('Another run is preparing the same data; waiting for it.')
      fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def sync(path: str) -> None:
  """Waits until a file's bytes, or a directory's names, are on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
