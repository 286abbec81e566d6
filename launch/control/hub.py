"""Where the other launchers of a run join, report, and get their orders.

An HTTP server in a thread of the first launcher. A launcher posts `join` once,
then `events` whenever its workers tell something, and `orders` again and again,
which is answered when there is one or after a while; whoever is not heard of
for the heartbeat's timeout is lost.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
import concurrent.futures
import dataclasses
import threading
import time
from typing import Any

from aiohttp import web

from launch.control import channel
from launch.control import protocol

Kind = protocol.EventKind


@dataclasses.dataclass
class _Member:
  """A launcher that joined: under which number, and what it was ordered."""

  name: str
  place: str
  heard_s: float
  is_substitute: bool = False
  orders: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Hub:
  """The launchers of a run but the first; call its methods from any thread."""

  def __init__(
    self,
    *,
    secret: bytes,
    epoch: int,
    hosts: int,
    digest: str,
    heartbeat_timeout_s: float,
    deliver: Callable[[protocol.Event], None],
  ):
    """Opens nothing.

    Args:
      secret: of the run.
      epoch: number of this launch.
      hosts: launchers of the run, without standbys.
      digest: of the config, the same for all launchers.
      heartbeat_timeout_s: who is silent for longer is lost.
      deliver: receives HOST_JOINED, HOST_LOST and the agents' events, in
        another thread; it may block.
    """
    self._secret = secret
    self._epoch = epoch
    self._hosts = hosts
    self._digest = digest
    self._timeout_s = heartbeat_timeout_s
    self._deliver = deliver
    self._members: dict[str, _Member] = {}  # by place: 'host 2', 'standby ab12'
    self._sequences: dict[str, int] = {}
    self._loop = asyncio.new_event_loop()
    # One thread, so that events keep their order.
    self._courier = concurrent.futures.ThreadPoolExecutor(1)
    self._runner: web.AppRunner | None = None
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='hub', daemon=True
    )

  def open(self, address: str, port: int) -> None:
    """Listens.

    Raises:
      OSError: the address is not this host's, or the port is taken.
    """
    self._thread.start()
    self._call(self._open(address, port))

  def order(self, place: str, order: dict[str, Any]) -> None:
    """Leaves an order for a launcher; one that is gone does not get it."""
    self._call(self._order(place, order))

  def promote(self, standby: str, place: str) -> None:
    """Gives a standby the place of a lost launcher."""
    self._call(self._promote(standby, place))

  def close(self, last: dict[str, Any], patience_s: float) -> None:
    """Gives all launchers a last order, and ends when they have it.

    Args:
      last: the order.
      patience_s: how long to wait for those that do not fetch it.
    """
    if self._thread.is_alive():
      self._call(self._close(last, patience_s))
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join()
    self._courier.shutdown()

  def _call(self, work: Awaitable[Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result()

  async def _open(self, address: str, port: int) -> None:
    app = web.Application(client_max_size=channel.MAX_BODY_BYTES)
    for name, answer in (
      ('join', self._join),
      ('events', self._take_events),
      ('orders', self._give_orders),
      ('leave', self._leave),
    ):
      app.router.add_post(f'/{name}', self._signed(answer))
    self._runner = web.AppRunner(app, access_log=None)
    await self._runner.setup()
    await web.TCPSite(self._runner, address, port).start()
    self._watching = asyncio.create_task(self._watch())

  async def _close(self, last: dict[str, Any], patience_s: float) -> None:
    for place in list(self._members):
      await self._order(place, last)
    deadline = time.monotonic() + patience_s
    while self._members and time.monotonic() < deadline:
      await asyncio.sleep(0.05)
    if self._runner is not None:
      self._watching.cancel()
      await self._runner.cleanup()

  async def _order(self, place: str, order: dict[str, Any]) -> None:
    member = self._members.get(place)
    if member is not None:
      member.orders.append(order)
      member.news.set()

  async def _promote(self, standby: str, place: str) -> None:
    member = self._members.pop(standby, None)
    if member is not None:
      member.place = place
      member.is_substitute = True
      self._members[place] = member
      await self._order(place, {'do': 'place', 'place': place})

  def _signed(self, answer: Callable[..., Awaitable[dict[str, Any]]]):
    """A handler that unseals the request, checks it, and seals the answer."""

    async def handle(request: web.Request) -> web.Response:
      content = await request.read()
      try:
        head, body = channel.unseal(self._secret, content, request.headers)
        stream = f'{head.sender}{request.path}'
        if head.sequence <= self._sequences.get(stream, -1):
          raise channel.RefusedError('the message was sent before')
        self._sequences[stream] = head.sequence
      except channel.RefusedError as error:
        return web.Response(status=403, text=str(error))
      if head.epoch in (0, self._epoch):
        reply = await answer(head.sender, body)
      else:  # of a launch before this one, whose members must join again
        reply = {'unknown': True}
      sender = f'controller to {stream}'
      content, headers = channel.seal(
        self._secret, channel.Head(self._epoch, sender, head.sequence), reply
      )
      return web.Response(body=content, headers=headers)

    return handle

  async def _join(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
    host, where = body['host'], body['where']
    place = f'standby {name}' if host is None else f'host {host}'
    if body['digest'] != self._digest:
      return {
        'error': 'the first launcher has another config: give all of them the'
        ' same --config and the same flags'
      }
    if host is not None and not 1 <= host < self._hosts:
      return {'error': f'the first launcher knows hosts 0 to {self._hosts - 1}'}
    if await self._is_taken(place, name):
      if self._members[place].is_substitute:
        return {'replaced': True}
      text = f'two launchers say that they are {place}; the second is {where}'
      await self._tell(Kind.WARNING, text=text)
      return {'error': f'{text}: give each its own --host'}
    self._members[place] = _Member(name, place, time.monotonic())
    await self._tell(
      Kind.HOST_JOINED,
      place=place,
      processes=body['processes'],
      where=where,
    )
    return {'epoch': self._epoch, 'poll_s': self._timeout_s / 3}

  async def _is_taken(self, place: str, name: str) -> bool:
    """Whether another launcher lives at this place; waits until that is known.

    A launcher that was killed and started again must wait for its own end.
    """
    asked_s = time.monotonic()
    while (there := self._members.get(place)) and there.name != name:
      if there.heard_s > asked_s:
        return True
      await asyncio.sleep(0.1)
    return False

  async def _take_events(
    self, name: str, body: dict[str, Any]
  ) -> dict[str, Any]:
    member = self._member(name)
    if member is None:
      return {'unknown': True}
    for line in body['events']:
      event = protocol.decode(line.encode())
      if event.source in ('agent', 'worker'):
        await self._send(event)
    return {}

  async def _give_orders(
    self, name: str, body: dict[str, Any]
  ) -> dict[str, Any]:
    """Orders from number `have` on, as soon as there is one."""
    member = self._member(name)
    if member is None:
      return {'unknown': True}
    if len(member.orders) <= body['have']:
      member.news.clear()
      try:
        await asyncio.wait_for(member.news.wait(), self._timeout_s / 3)
      except TimeoutError:
        return {'orders': []}
    orders = member.orders[body['have'] :]
    if any(order['do'] == 'end' for order in orders):
      self._members.pop(member.place, None)
    return {'orders': orders}

  async def _leave(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
    member = self._member(name)
    if member is not None:
      del self._members[member.place]
      await self._tell(
        Kind.HOST_LOST,
        place=member.place,
        text=f'{member.place} left: {body["reason"]}',
      )
    return {}

  def _member(self, name: str) -> _Member | None:
    for member in self._members.values():
      if member.name == name:
        member.heard_s = time.monotonic()
        return member
    return None

  async def _watch(self) -> None:
    while True:
      await asyncio.sleep(min(1.0, self._timeout_s / 4))
      silent_since = time.monotonic() - self._timeout_s
      for place, member in list(self._members.items()):
        if member.heard_s < silent_since:
          del self._members[place]
          await self._tell(
            Kind.HOST_LOST,
            place=place,
            text=f'{place} was not heard of for {self._timeout_s:g} s',
          )

  async def _tell(self, kind: protocol.EventKind, **data: Any) -> None:
    await self._send(
      protocol.Event(kind, 'controller', time.time(), None, data)
    )

  async def _send(self, event: protocol.Event) -> None:
    await self._loop.run_in_executor(self._courier, self._deliver, event)
