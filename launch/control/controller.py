"""The loop of a launch: events in, journal, fold, decide, act.

Single-threaded. It sleeps until an event, a signal or the end of a wait, and
whatever it does is in the journal before it is done.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import queue
import signal
import socket
import threading
import time
from typing import Any

from launch.control import cluster as cluster_lib
from launch.control import fleet as fleet_lib
from launch.control import journal as journal_lib
from launch.control import policy
from launch.control import protocol


class Mailbox:
  """What the controller waits for: the worker's events, and signals."""

  def __init__(self, max_unread: int):
    """Opens the mailbox.

    Args:
      max_unread: `put` blocks beyond this many unread events, so that a worker
        that floods its pipe is slowed and not this process filled.
    """
    # SimpleQueue.put may be called in a signal handler, Queue.put may not.
    self._items: queue.SimpleQueue[protocol.Event | signal.Signals] = (
      queue.SimpleQueue()
    )
    self._slots = threading.Semaphore(max_unread)
    self._closed = False

  def put(self, event: protocol.Event) -> None:
    """Adds an event; blocks while the mailbox is full, drops once closed."""
    self._slots.acquire()
    if self._closed:
      self._slots.release()
      return
    self._items.put(event)

  def put_signal(self, signal_number: int) -> None:
    """Adds a signal; never blocks, so a signal handler may call it."""
    self._items.put(signal.Signals(signal_number))

  def get(
    self, timeout_s: float | None
  ) -> list[protocol.Event | signal.Signals]:
    """Returns everything unread, oldest first; [] when nothing came in time."""
    items = []
    with contextlib.suppress(queue.Empty):
      items.append(self._items.get(timeout=timeout_s))
      while len(items) < _MAX_BATCH:
        items.append(self._items.get_nowait())
    for item in items:
      if isinstance(item, protocol.Event):
        self._slots.release()
    return items

  def close(self) -> None:
    """Lets every `put` return, now and later."""
    self._closed = True
    self._slots.release()


class Controller:
  """Runs one launch."""

  def __init__(
    self,
    *,
    cluster: cluster_lib.Cluster,
    grace_s: float,
    journal: journal_lib.Journal,
    fleet: fleet_lib.Fleet,
    mailbox: Mailbox,
    show: Callable[[protocol.Event], None],
  ):
    """Says what to run.

    Args:
      cluster: the fold of the journal so far.
      grace_s: seconds that a worker asked to stop may take.
      journal: every event goes here first.
      fleet: starts the workers; it delivers to `mailbox`.
      mailbox: where events and signals arrive.
      show: draws an event for the user.
    """
    self._cluster = cluster
    self._grace_s = grace_s
    self._journal = journal
    self._fleet = fleet
    self._mailbox = mailbox
    self._show = show
    self._kill_at: float | None = None

  def run(self, **about_run: Any) -> policy.Finish:
    """Runs until the policy says finish; leaves no process behind.

    Args:
      **about_run: JSON values, kept with the RUN_STARTED event.

    Returns:
      How the launch ended.

    Raises:
      OSError: when the journal cannot be written any more; the worker was asked
        to save and end.
    """
    finish = policy.Finish(
      protocol.ExitCode.CRASHED, 'the first launcher could not go on'
    )
    try:
      self._record(protocol.EventKind.RUN_STARTED, **about_run)
      self._record(
        protocol.EventKind.HOST_JOINED,
        place=fleet_lib.HERE,
        processes=self._fleet.num_local_workers,
        where=socket.gethostname(),
      )
      while (done := self._act()) is None:
        pass
      finish = done
      return finish
    except OSError:
      self._stop_without_journal()
      raise
    finally:
      self._mailbox.close()
      self._fleet.close(finish, _GOODBYE_S)

  def _act(self) -> policy.Finish | None:
    """Decides once, and waits for what comes next."""
    wait_until_s = None
    for action in policy.decide(self._cluster, time.time()):
      match action:
        case policy.Finish(exit_code, reason):
          self._record(
            protocol.EventKind.RUN_ENDED, exit_code=int(exit_code), text=reason
          )
          return action
        case policy.StartWorkers():
          self._start(action)
          return None
        case policy.Promote(standby, place):
          self._decided(
            'promote',
            f'{standby} takes the place of {place}',
            standby=standby,
            place=place,
          )
          self._fleet.promote(standby, place)
          return None
        case policy.KillWorkers(reason):
          self._decided('kill_workers', reason)
          self._fleet.kill()
          return None
        case policy.Wait(until_s):
          wait_until_s = until_s
    items = self._mailbox.get(self._timeout_s(wait_until_s))
    self._take([item for item in items if isinstance(item, protocol.Event)])
    for item in items:
      if isinstance(item, signal.Signals):
        self._on_signal(item)
    if self._kill_at is not None and time.monotonic() >= self._kill_at:
      self._kill_at = None
      self._decided(
        'kill', f'the worker did not end within {self._grace_s:g} s: killing it'
      )
      self._fleet.kill()
    return None

  def _start(self, action: policy.StartWorkers) -> None:
    processes = sum(number for _, number in action.hosts)
    what = 'the worker' if processes == 1 else f'{processes} workers'
    text = f'starting {what} (attempt {action.attempt})'
    if action.attempt > 1:
      end = cluster_lib.describe_end(self._cluster.attempts[-1])
      text += f' after the last one ended: {end}'
    self._decided(
      'start_workers',
      text,
      attempt=action.attempt,
      hosts=[list(each) for each in action.hosts],
    )
    self._take(self._fleet.start(action.attempt, action.hosts))

  def _on_signal(self, signal_number: signal.Signals) -> None:
    if not self._cluster.stop_requested:
      self._decided(
        'stop',
        f'{signal_number.name}: waiting up to {self._grace_s:g} s for the '
        'worker to save and end (Ctrl-C kills it now)',
      )
      self._fleet.terminate()
      self._kill_at = time.monotonic() + self._grace_s
    elif signal_number == signal.SIGINT:
      self._kill_at = None
      self._decided('kill', 'Ctrl-C again: killing the worker')
      self._fleet.kill()

  def _timeout_s(self, wait_until_s: float | None) -> float | None:
    timeouts = []
    if wait_until_s is not None:
      timeouts.append(wait_until_s - time.time())
    if self._kill_at is not None:
      timeouts.append(self._kill_at - time.monotonic())
    return max(0.0, min(timeouts)) if timeouts else None

  def _decided(self, action: str, text: str, **data: Any) -> None:
    self._record(protocol.EventKind.DECISION, action=action, text=text, **data)

  def _record(self, kind: protocol.EventKind, **data: Any) -> None:
    event = protocol.Event(kind, 'controller', time.time(), None, data)
    self._take([event])

  def _take(self, events: Sequence[protocol.Event]) -> None:
    """Journals events in one transaction, then lets them take effect."""
    self._journal.append(events)
    for event in events:
      self._cluster = cluster_lib.fold(self._cluster, event)
      self._show(event)

  def _stop_without_journal(self) -> None:
    """Gives the worker its grace to save, though nothing can be recorded."""
    self._fleet.terminate()
    deadline = time.monotonic() + self._grace_s
    while self._fleet.is_running_here() and time.monotonic() < deadline:
      # Reading keeps the worker's pipe from filling up and blocking it.
      if signal.SIGINT in self._mailbox.get(timeout_s=0.2):
        return


# How long other launchers may take to hear of the end.
_GOODBYE_S = 10.0
# Events that share one transaction, and so one wait for the disk.
_MAX_BATCH = 256
