"""What is known about a run: a fold over its events, oldest first.

No clock, no files: the journal's events are all it reads.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import signal

from launch.control import diagnosis
from launch.control import protocol

_KILLED = 128 + signal.SIGKILL
# Steps whose times say how long the next one may take.
_MAX_GAPS = 100
# Ends that would only come back.
NOT_HEALABLE = {
  protocol.ExitCode.USER_ERROR,
  protocol.ExitCode.NOT_FINITE,
  protocol.ExitCode.OUT_OF_MEMORY,
  protocol.ExitCode.DISK_FULL,
}


@dataclasses.dataclass(frozen=True)
class Limits:
  """The config's `launch` group, as far as it decides.

  Attributes:
    max_restarts: restarts of one launch, without those after a preemption.
    max_restarts_without_progress: restarts in a row that reach no new step.
    backoff_s: seconds between a worker's end and its restart.
    join_timeout_s: seconds to wait for hosts that are missing.
    stuck_timeout_s: seconds without a word after which workers that live count
      as stuck; sooner where steps are known to be short.
  """

  max_restarts: int
  max_restarts_without_progress: int
  backoff_s: float
  join_timeout_s: float
  stuck_timeout_s: float


@dataclasses.dataclass(frozen=True)
class Exit:
  """How one worker ended.

  Attributes:
    process: its number.
    exit_code: 128 + n for signal n; see `diagnosis.explain`.
    error: one line.
    time_s: when, in seconds since 1970.
    killed: whether it was killed because another one had ended.
  """

  process: int
  exit_code: int
  error: str
  time_s: float
  killed: bool


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One life of the workers.

  Attributes:
    number: 1 for the first of this launch.
    places: of every worker, by its number: 'host 0', ...
    started_s: when it started, in seconds since 1970.
    first_step: the first step it reported, restored or trained.
    last_step: the last step it trained.
    made_progress: whether it trained or saved a step that no attempt before it
      had.
    errors: the last ERROR text of each worker that sent one.
    exits: of the workers that ended, in that order.
    killing: why the rest of the workers was killed; '' if it was not.
    heard_s: when a worker last told that its work goes on.
    step_gaps_s: seconds between the last steps that were told, newest last.
  """

  number: int
  places: tuple[str, ...]
  started_s: float
  first_step: int | None = None
  last_step: int | None = None
  made_progress: bool = False
  errors: Mapping[int, str] = dataclasses.field(default_factory=dict)
  exits: tuple[Exit, ...] = ()
  killing: str = ''
  heard_s: float = 0.0
  step_gaps_s: tuple[float, ...] = ()

  @property
  def processes(self) -> int:
    """How many workers it has."""
    return len(self.places)

  @property
  def ended_s(self) -> float | None:
    """When the last worker ended; None while one lives."""
    if len(self.exits) < self.processes:
      return None
    return max(each.time_s for each in self.exits)

  @property
  def cause(self) -> Exit | None:
    """The exit that explains the end: the first of the gravest kind."""
    return min(self.exits, key=_gravity, default=None)


@dataclasses.dataclass(frozen=True)
class Cluster:
  """What is known about the run; built by folding events.

  Attributes:
    limits: when to give up.
    workdir: where a reader of a message finds the workers' logs.
    num_hosts: how many hosts the run needs.
    hosts: workers of each host that is there, by place; standbys, too.
    missing_since_s: since when a host is missing.
    attempts: those of this launch, oldest first.
    best_step: the furthest step any attempt of any launch trained.
    best_checkpoint: the furthest step any attempt of any launch saved.
    stop_requested: whether this launch was asked to end.
    ended: whether this launch has ended.
  """

  limits: Limits
  workdir: str
  num_hosts: int
  hosts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  missing_since_s: float = 0.0
  attempts: tuple[Attempt, ...] = ()
  best_step: int | None = None
  best_checkpoint: int | None = None
  stop_requested: bool = False
  ended: bool = False


def fold(cluster: Cluster, event: protocol.Event) -> Cluster:
  """Takes one event into account.

  Args:
    cluster: what was known before it.
    event: RUN_STARTED begins a new launch: attempts are forgotten, the best
      steps are not.

  Returns:
    What is known now.
  """
  change = _CHANGES.get(event.kind)
  return cluster if change is None else change(cluster, event)


def describe_end(attempt: Attempt) -> str:
  """Says how an attempt ended: 'killed by SIGKILL at step 7: out of ...'."""
  cause = attempt.cause
  if cause.killed:
    return attempt.killing
  text = protocol.describe_exit(cause.exit_code)
  if attempt.processes > 1:
    text = f'process {cause.process} {text}'
  if attempt.last_step is not None:
    text += f' at step {attempt.last_step}'
  return f'{text}: {cause.error}' if cause.error else text


def _gravity(each: Exit) -> tuple[int, float]:
  """Sorts exits: the smallest explains the end of an attempt."""
  if each.killed:
    kind = 4
  elif each.exit_code in NOT_HEALABLE:
    kind = 0
  elif each.exit_code == protocol.ExitCode.PEER_LOST:
    kind = 3
  elif each.exit_code == protocol.ExitCode.PREEMPTED:
    kind = 2
  elif each.exit_code == protocol.ExitCode.DONE:
    kind = 5
  else:
    kind = 1
  return kind, each.time_s


def _on_run_started(cluster: Cluster, event: protocol.Event) -> Cluster:
  return dataclasses.replace(
    cluster,
    hosts={},
    missing_since_s=event.time_s,
    attempts=(),
    stop_requested=False,
    ended=False,
  )


def _on_host_joined(cluster: Cluster, event: protocol.Event) -> Cluster:
  joined = {event.data['place']: event.data['processes']}
  return dataclasses.replace(cluster, hosts={**cluster.hosts, **joined})


def _on_host_lost(cluster: Cluster, event: protocol.Event) -> Cluster:
  """The host's workers count as ended, whatever became of them."""
  place = event.data['place']
  hosts = {p: n for p, n in cluster.hosts.items() if p != place}
  cluster = dataclasses.replace(
    cluster, hosts=hosts, missing_since_s=event.time_s
  )
  if not cluster.attempts:
    return cluster
  last = cluster.attempts[-1]
  known = {each.process for each in last.exits}
  lost = tuple(
    Exit(
      process,
      protocol.ExitCode.HOST_LOST,
      event.data['text'],
      event.time_s,
      killed=False,
    )
    for process, its_place in enumerate(last.places)
    if its_place == place and process not in known
  )
  return _with_last(cluster, exits=(*last.exits, *lost))


def _on_progress(cluster: Cluster, event: protocol.Event) -> Cluster:
  if not cluster.attempts:
    return cluster
  if event.step is None:
    return _on_message(cluster, event)
  attempt = cluster.attempts[-1]
  first_step, gaps_s = attempt.first_step, attempt.step_gaps_s
  if attempt.last_step is not None:
    gaps_s = (*gaps_s, event.time_s - attempt.heard_s)[-_MAX_GAPS:]
  cluster = _with_last(
    cluster,
    first_step=event.step if first_step is None else first_step,
    last_step=event.step,
    heard_s=event.time_s,
    step_gaps_s=gaps_s,
  )
  if cluster.best_step is not None and event.step <= cluster.best_step:
    return cluster
  return dataclasses.replace(
    _with_last(cluster, made_progress=True), best_step=event.step
  )


def _on_phase(cluster: Cluster, event: protocol.Event) -> Cluster:
  """A new kind of work, whose pieces may take longer or shorter."""
  if not cluster.attempts:
    return cluster
  return _with_last(cluster, heard_s=event.time_s, step_gaps_s=())


def _on_message(cluster: Cluster, event: protocol.Event) -> Cluster:
  if not cluster.attempts:
    return cluster
  return _with_last(cluster, heard_s=event.time_s)


def _on_restored(cluster: Cluster, event: protocol.Event) -> Cluster:
  if event.step is None or not cluster.attempts:
    return cluster
  return _with_last(cluster, first_step=event.step, heard_s=event.time_s)


def _on_checkpoint(cluster: Cluster, event: protocol.Event) -> Cluster:
  best = cluster.best_checkpoint
  if event.step is None or not cluster.attempts:
    return cluster
  cluster = _with_last(cluster, heard_s=event.time_s)
  if best is not None and event.step <= best:
    return cluster
  return dataclasses.replace(
    _with_last(cluster, made_progress=True), best_checkpoint=event.step
  )


def _on_error(cluster: Cluster, event: protocol.Event) -> Cluster:
  if not cluster.attempts:
    return cluster
  errors = cluster.attempts[-1].errors
  text = {event.data['process']: event.data['text']}
  return _with_last(cluster, errors={**errors, **text})


def _on_worker_exited(cluster: Cluster, event: protocol.Event) -> Cluster:
  if not cluster.attempts:
    return cluster
  last, data = cluster.attempts[-1], event.data
  if data['attempt'] != last.number or data['process'] in {
    each.process for each in last.exits
  }:
    return cluster  # of a host that was given up, or told twice
  exit_code, error = diagnosis.explain(
    data['exit_code'], last.errors.get(data['process'], ''), data['log_tail']
  )
  killed = bool(last.killing) and data['exit_code'] == _KILLED
  ended = Exit(data['process'], exit_code, error, event.time_s, killed)
  return _with_last(cluster, exits=(*last.exits, ended))


def _on_decision(cluster: Cluster, event: protocol.Event) -> Cluster:
  match event.data['action']:
    case 'start_workers':
      places = tuple(
        place
        for place, processes in event.data['hosts']
        for _ in range(processes)
      )
      attempt = Attempt(
        event.data['attempt'], places, event.time_s, heard_s=event.time_s
      )
      return dataclasses.replace(cluster, attempts=(*cluster.attempts, attempt))
    case 'promote':
      hosts = dict(cluster.hosts)
      hosts[event.data['place']] = hosts.pop(event.data['standby'])
      return dataclasses.replace(cluster, hosts=hosts)
    case 'stop':
      return dataclasses.replace(cluster, stop_requested=True)
    case 'kill_workers' if cluster.attempts:
      return _with_last(cluster, killing=event.data['text'])
  return cluster


def _on_run_ended(cluster: Cluster, event: protocol.Event) -> Cluster:
  del event
  return dataclasses.replace(cluster, ended=True)


def _with_last(cluster: Cluster, **changes) -> Cluster:
  last = dataclasses.replace(cluster.attempts[-1], **changes)
  return dataclasses.replace(cluster, attempts=(*cluster.attempts[:-1], last))


_CHANGES: dict[
  protocol.EventKind, Callable[[Cluster, protocol.Event], Cluster]
] = {
  protocol.EventKind.RUN_STARTED: _on_run_started,
  protocol.EventKind.HOST_JOINED: _on_host_joined,
  protocol.EventKind.HOST_LOST: _on_host_lost,
  protocol.EventKind.PHASE: _on_phase,
  protocol.EventKind.MESSAGE: _on_message,
  protocol.EventKind.PROGRESS: _on_progress,
  protocol.EventKind.RESTORED: _on_restored,
  protocol.EventKind.CHECKPOINT_SAVED: _on_checkpoint,
  protocol.EventKind.ERROR: _on_error,
  protocol.EventKind.WORKER_EXITED: _on_worker_exited,
  protocol.EventKind.DECISION: _on_decision,
  protocol.EventKind.RUN_ENDED: _on_run_ended,
}
