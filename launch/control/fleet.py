"""All agents of a run as one: this host's, and those behind the hub."""

from __future__ import annotations

from collections.abc import Sequence
import socket
from typing import TYPE_CHECKING

from launch.control import agent as agent_lib
from launch.control import policy
from launch.control import protocol

if TYPE_CHECKING:  # it imports aiohttp, which one host does not need
  from launch.control import hub as hub_lib

# The place of the first launcher, whose agent is in this process.
HERE = 'host 0'


class Fleet:
  """The workers of all hosts; call its methods from one thread."""

  def __init__(
    self,
    agent: agent_lib.Agent,
    hub: hub_lib.Hub | None,
    address: str,
    bind_address: str,
  ):
    """Says who is there; starts nothing.

    Args:
      agent: of this host.
      hub: of the other launchers; None where there are none.
      address: of this host, where workers of other hosts find the first one.
      bind_address: of this host, where it listens.
    """
    self._agent = agent
    self._hub = hub
    self._address = address
    self._bind_address = bind_address
    self._others: list[str] = []

  @property
  def num_local_workers(self) -> int:
    """How many workers an attempt has on this host."""
    return self._agent.num_workers

  def start(
    self, attempt: int, hosts: Sequence[tuple[str, int]]
  ) -> tuple[protocol.Event, ...]:
    """Starts the workers of all hosts.

    Args:
      attempt: its number.
      hosts: so many workers at each place, numbered in this order.

    Returns:
      What happened on this host at once; see `Agent.start`.
    """
    processes = sum(number for _, number in hosts)
    coordinator = bind = ''
    if processes > 1:
      port = _free_port()
      coordinator = f'{self._address}:{port}'
      bind = f'{self._bind_address}:{port}'
    self._others = [place for place, _ in hosts if place != HERE]
    first = 0
    events = ()
    for place, number in hosts:
      assignment = agent_lib.Assignment(
        attempt, first, processes, coordinator, bind
      )
      if place == HERE:
        events = self._agent.start(assignment)
      else:
        self._hub.order(place, {'do': 'start', **vars(assignment)})
      first += number
    return events

  def promote(self, standby: str, place: str) -> None:
    """Gives a standby the place of a lost host."""
    self._hub.promote(standby, place)

  def terminate(self) -> None:
    """Asks all workers to save and end; they may take their time."""
    self._agent.terminate()
    self._order('terminate')

  def kill(self) -> None:
    """Kills all workers now."""
    self._agent.kill()
    self._order('kill')

  def is_running_here(self) -> bool:
    """Whether a worker of this host lives."""
    return self._agent.is_running()

  def close(self, finish: policy.Finish, patience_s: float) -> None:
    """Ends all launchers; leaves no process behind.

    Args:
      finish: how the run ended, for the other launchers.
      patience_s: how long to wait for those that do not answer.
    """
    self._agent.close()
    if self._hub is not None:
      last = {'do': 'end', **vars(finish)}
      self._hub.close(last, patience_s)

  def _order(self, what: str) -> None:
    for place in self._others:
      self._hub.order(place, {'do': what})


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('', 0))
    return probe.getsockname()[1]
