"""Writes TensorBoard's event files, step by step and in the caller's thread.

tensorboardX's own writer has a thread that dies of a full disk; its caller then
waits for ever. Here a write that fails raises.

Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

import os
import socket
import struct
import time

from tensorboardX import record_writer
from tensorboardX.proto import event_pb2
from tensorboardX.proto import summary_pb2


class EventFile:
  """A new event file, which continues those that the directory holds."""

  def __init__(self, directory: str, first_step: int):
    """Makes the file.

    Args:
      directory: made if it is missing.
      first_step: what earlier files hold from this step on is void.

    Raises:
      OSError: the file cannot be written.
    """
    os.makedirs(directory, exist_ok=True)
    # TensorBoard reads the files of a directory in the order of their names.
    name = (
      f'events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}'
      f'.{os.getpid()}'
    )
    self._file = open(  # noqa: SIM115 (closed by `close`)
      os.path.join(directory, name), 'ab', buffering=0
    )
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    try:
      self._append(event_pb2.Event(file_version='brain.Event:2'))
      self._append(event_pb2.Event(step=first_step, session_log=start))
    except OSError:
      self._file.close()
      raise

  def write(self, step: int, values: dict[str, float]) -> None:
    """Adds a step's values; the kernel has them when this returns.

    Raises:
      OSError: they were not written (a full disk, say).
    """
    scalars = [
      summary_pb2.Summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
    ]
    summary = summary_pb2.Summary(value=scalars)
    self._append(event_pb2.Event(step=step, summary=summary))

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _append(self, event: event_pb2.Event) -> None:
    """Writes a record: length, its checksum, the event, its checksum."""
    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    record = b''.join((length, _checksum(length), content, _checksum(content)))
    while record:
      record = record[self._file.write(record) :]


def _checksum(content: bytes) -> bytes:
  return struct.pack('<I', record_writer.masked_crc32c(content))
