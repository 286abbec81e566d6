"""A launcher that is not the first: joins, and runs its workers as ordered.

It posts what its workers tell to the first launcher's hub and asks it for
orders, until it is ordered to end or the hub is silent for too long.
"""

import asyncio
from collections.abc import Callable
import contextlib
import dataclasses
import itertools
import secrets
import signal
import socket
import time
from typing import Any

import aiohttp

from launch.control import agent as agent_lib
from launch.control import channel
from launch.control import policy
from launch.control import protocol

# Between two attempts to reach the first launcher.
_RETRY_S = 0.5
# Events of one message.
_MAX_EVENTS = 100


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to reach the first launcher.

  Attributes:
    coordinator: its 'ADDRESS:PORT'.
    host: number of this one; None for a standby.
    secret: of the run.
    digest: of the config.
    join_timeout_s: how long it may be silent at the start.
    heartbeat_timeout_s: how long it may be silent afterwards.
  """

  coordinator: str
  host: int | None
  secret: bytes
  digest: str
  join_timeout_s: float
  heartbeat_timeout_s: float


class _RefusedError(Exception):
  """The hub does not want us: no use to try again."""


class Member:
  """Runs one launch; call `run` once."""

  def __init__(
    self,
    settings: Settings,
    make_agent: Callable[..., agent_lib.Agent],
    tell: Callable[[str], None],
  ):
    """Says what to run.

    Args:
      settings: how to reach the first launcher.
      make_agent: `make_agent(deliver)` makes this host's agent.
      tell: gets lines for the user.
    """
    self._settings = settings
    self._tell = tell
    self._loop = asyncio.new_event_loop()
    self._outbox: asyncio.Queue[protocol.Event] = asyncio.Queue()
    self._agent = make_agent(self._deliver)
    self._host = settings.host
    self._name = secrets.token_hex(8)
    self._epoch = 0
    self._sequence = itertools.count()
    self._heard_s = time.monotonic()

  def run(self) -> policy.Finish:
    """Runs until the end; leaves no process behind."""
    try:
      return self._loop.run_until_complete(self._run())
    finally:
      self._agent.close()
      self._loop.close()

  def _deliver(self, event: protocol.Event) -> None:
    # After the end there is nobody to tell.
    if not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._outbox.put_nowait, event)

  async def _run(self) -> policy.Finish:
    self._stopping: asyncio.Task[None] | None = None
    self._working = asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):
      self._loop.add_signal_handler(number, self._on_signal)
    try:
      async with aiohttp.ClientSession() as self._session:
        joined = await self._join()
        sending = asyncio.create_task(self._send_events())
        try:
          return await self._obey(joined['poll_s'])
        finally:
          sending.cancel()
          if self._stopping is not None:
            self._stopping.cancel()
    except _RefusedError as error:
      return policy.Finish(protocol.ExitCode.USER_ERROR, str(error))
    except TimeoutError as error:
      return policy.Finish(protocol.ExitCode.PEER_LOST, str(error))
    except asyncio.CancelledError:
      return policy.Finish(protocol.ExitCode.PREEMPTED, 'stopped as asked')

  def _on_signal(self) -> None:
    if self._stopping is None:
      self._tell('asked to stop: the workers save and end')
      self._agent.terminate()
      self._stopping = self._loop.create_task(self._stop())

  async def _stop(self) -> None:
    """Leaves the run once the workers have saved and all is told."""
    while self._agent.is_running() or not self._outbox.empty():
      await asyncio.sleep(0.1)
    if self._epoch:
      with contextlib.suppress(TimeoutError, _RefusedError):
        await self._post('leave', {'reason': 'asked to stop'}, 5.0, 5.0)
    self._working.cancel()

  async def _join(self) -> dict[str, Any]:
    self._epoch = 0
    body = {
      'host': self._host,
      'digest': self._settings.digest,
      'processes': self._agent.num_workers,
      'where': socket.gethostname(),
    }
    # It answers late where the one before us at this place must be lost first.
    patience_s = self._settings.heartbeat_timeout_s + 10.0
    answer = await self._post(
      'join', body, self._settings.join_timeout_s, patience_s
    )
    if 'error' in answer:
      raise _RefusedError(answer['error'])
    if 'replaced' in answer:
      self._tell(f'a standby has the place of host {self._host} by now')
      self._host = None
      return await self._join()
    self._epoch = answer['epoch']
    who = 'a standby'
    if self._host is not None:
      who = f'host {self._host}'
    self._tell(f'joined the run at {self._settings.coordinator} as {who}')
    return answer

  async def _send_events(self) -> None:
    while True:
      events = [await self._outbox.get()]
      while not self._outbox.empty() and len(events) < _MAX_EVENTS:
        events.append(self._outbox.get_nowait())
      lines = [protocol.encode(event).decode() for event in events]
      await self._post(
        'events', {'events': lines}, self._settings.heartbeat_timeout_s, 10.0
      )

  async def _obey(self, poll_s: float) -> policy.Finish:
    have = 0
    while True:
      answer = await self._post(
        'orders',
        {'have': have},
        self._settings.heartbeat_timeout_s,
        poll_s + 10.0,
      )
      if 'unknown' in answer:
        # Lost to the hub, which gave the place up; its workers are of no use.
        self._agent.kill()
        await self._join()
        have = 0
        continue
      for order in answer['orders']:
        have += 1
        match order['do']:
          case 'start' if self._stopping is None:
            self._start(order)
          case 'place':
            self._tell(f'taking the place of {order["place"]}')
          case 'terminate':
            self._agent.terminate()
          case 'kill':
            self._agent.kill()
          case 'end':
            return policy.Finish(order['exit_code'], order['reason'])

  def _start(self, order: dict[str, Any]) -> None:
    self._agent.kill()
    assignment = agent_lib.Assignment(
      attempt=order['attempt'],
      first_process=order['first_process'],
      processes=order['processes'],
      coordinator=order['coordinator'],
      bind=order['bind'],
    )
    self._tell(
      f'starting {self._agent.num_workers} of {assignment.processes} workers'
      f' (attempt {assignment.attempt})'
    )
    for event in self._agent.start(assignment):
      self._outbox.put_nowait(event)

  async def _post(
    self, path: str, body: dict[str, Any], patience_s: float, answer_s: float
  ) -> dict[str, Any]:
    """Posts until there is an answer.

    Raises:
      TimeoutError: there was none for `patience_s`.
      _RefusedError: it was refused.
    """
    deadline = time.monotonic() + patience_s
    url = f'http://{self._settings.coordinator}/{path}'
    while True:
      head = channel.Head(self._epoch, self._name, next(self._sequence))
      content, headers = channel.seal(self._settings.secret, head, body)
      try:
        async with self._session.post(
          url,
          data=content,
          headers=headers,
          timeout=aiohttp.ClientTimeout(total=answer_s),
        ) as response:
          answer = await response.read()
          if response.status == 403:
            raise _RefusedError(
              f'{self._settings.coordinator} refused us:'
              f' {answer.decode(errors="replace")}'
            )
          response.raise_for_status()
          signed, reply = channel.unseal(
            self._settings.secret, answer, response.headers
          )
          expected = f'controller to {self._name}/{path}'
          if (signed.sender, signed.sequence) != (expected, head.sequence):
            raise channel.RefusedError('the answer is to another message')
          return reply
      except (
        aiohttp.ClientError,
        TimeoutError,
        channel.RefusedError,
        OSError,
      ) as error:
        if time.monotonic() > deadline:
          raise TimeoutError(
            f'no answer from the first launcher at {self._settings.coordinator}'
            f' for {patience_s:g} s ({_reason(error)}): check that it runs'
            ' there and that --coordinator is its address'
          ) from error
      await asyncio.sleep(_RETRY_S)


def _reason(error: Exception) -> str:
  return ' '.join(str(error).split()) or type(error).__name__
