"""Sends the worker's events to its agent over the inherited pipe.

The pipe also tells the worker whether its launcher lives: when the launcher
dies, the pipe has no reader, `connected` turns False, and the worker should
save and end rather than train on as an orphan.
"""

import os
import select
import threading
import time
from typing import Any

from launch.control import protocol

# Keeps a line with a traceback and a message below protocol.MAX_LINE_BYTES,
# even when JSON writes each character as six bytes.
_MAX_TEXT_CHARACTERS = 40_000


class Reporter:
  """Writes events to the agent; safe to call from any thread.

  Not from a signal handler: a handler may interrupt a `send` of its own thread,
  which holds the lock. Set a flag there, and send from the loop that reads it.
  """

  def __init__(self, fd: int, process: int):
    """Takes over the pipe's write end.

    Args:
      fd: the file descriptor that the agent passed as --events_fd.
      process: number of the worker; those after the first send errors only,
        for all have the same to tell.
    """
    # Children of the worker must not hold the pipe open after its death.
    os.set_inheritable(fd, False)
    self._fd = fd
    self._process = process
    self._lock = threading.Lock()
    self._connected = True

  @property
  def connected(self) -> bool:
    """Whether somebody still reads the events; asks the kernel, no write."""
    if self._connected:
      poll = select.poll()
      # Asks for no event, so what is reported is that the reader is gone.
      poll.register(self._fd, 0)
      if poll.poll(0):
        self._connected = False
    return self._connected

  def send(
    self, kind: protocol.EventKind, step: int | None = None, **data: Any
  ) -> None:
    """Sends one event; a no-op once the agent is gone.

    Args:
      kind: what happened.
      step: the optimizer step it belongs to, if any.
      **data: JSON values, by kind as in `protocol`; a text longer than 40,000
        characters loses its middle.

    Raises:
      TypeError: when `data` holds what JSON cannot (an array, say).
      ValueError: when `data` lacks a key of its kind.
    """
    if kind == protocol.EventKind.ERROR:
      data = {'process': self._process, **data}
    elif self._process > 0:
      return
    event = protocol.Event(
      kind=kind,
      source='worker',
      time_s=time.time(),
      step=step,
      data={key: _shortened(value) for key, value in data.items()},
    )
    line = memoryview(protocol.encode(event))
    with self._lock:
      try:
        while self._connected and line:
          line = line[os.write(self._fd, line) :]
      except BrokenPipeError:
        self._connected = False


def _shortened(value: Any) -> Any:
  if not isinstance(value, str) or len(value) <= _MAX_TEXT_CHARACTERS:
    return value
  half = _MAX_TEXT_CHARACTERS // 2
  cut = len(value) - 2 * half
  return f'{value[:half]}\n[{cut} characters cut]\n{value[-half:]}'
