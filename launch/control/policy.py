"""What to do next, as a pure function of what happened.

  cluster = fold(cluster, event)      events in, oldest first
  actions = decide(cluster, now)      StartWorker, Wait or Finish

A worker that crashed, was killed or was preempted is started again. Two budgets
bound this: the restarts of a launch (preemptions are free), and the restarts in
a row that got no further than the run had ever been (preemptions count, or a
worker that is preempted at once would be restarted for ever). Every other exit
code would only come back, so the run finishes with it.

No clock, no files: `now` is an argument.
"""

from collections.abc import Callable
import dataclasses

from launch.control import protocol


@dataclasses.dataclass(frozen=True)
class Limits:
  """The config's `launch` group, as far as it decides.

  Attributes:
    max_restarts: restarts of one launch, without those after a preemption.
    max_restarts_without_progress: restarts in a row that reach no new step.
    backoff_s: seconds between a worker's end and its restart.
  """

  max_restarts: int
  max_restarts_without_progress: int
  backoff_s: float


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One life of the worker.

  Attributes:
    number: 1 for the first of this launch.
    started_s: when it started, in seconds since 1970.
    first_step: the first step it reported, restored or trained.
    last_step: the last step it trained.
    made_progress: whether it trained or saved a step that no attempt before it
      had.
    error: its own last ERROR text, else the last line of its log.
    exit_code: None while it lives.
    ended_s: when it ended.
  """

  number: int
  started_s: float
  first_step: int | None = None
  last_step: int | None = None
  made_progress: bool = False
  error: str = ''
  exit_code: int | None = None
  ended_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Cluster:
  """What is known about the run; built by folding events.

  Attributes:
    limits: when to give up.
    log_path: where a reader of a message finds the worker's log.
    attempts: those of this launch, oldest first.
    best_step: the furthest step any attempt of any launch trained.
    best_checkpoint: the furthest step any attempt of any launch saved.
    stop_requested: whether this launch was asked to end.
    ended: whether this launch has ended.
  """

  limits: Limits
  log_path: str
  attempts: tuple[Attempt, ...] = ()
  best_step: int | None = None
  best_checkpoint: int | None = None
  stop_requested: bool = False
  ended: bool = False


@dataclasses.dataclass(frozen=True)
class StartWorker:
  """Start the worker now."""

  attempt: int


@dataclasses.dataclass(frozen=True)
class Wait:
  """Do nothing before `until_s`, in seconds since 1970."""

  until_s: float


@dataclasses.dataclass(frozen=True)
class Finish:
  """End the launch with an exit code and a line that says why."""

  exit_code: int
  reason: str


Action = StartWorker | Wait | Finish


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


def decide(cluster: Cluster, now: float) -> tuple[Action, ...]:
  """Says what to do.

  Args:
    cluster: what is known.
    now: seconds since 1970.

  Returns:
    Nothing while a worker runs or after the end; else one action.
  """
  if cluster.ended:
    return ()
  if not cluster.attempts:
    if cluster.stop_requested:
      return (Finish(protocol.ExitCode.PREEMPTED, 'stopped as asked'),)
    return (StartWorker(1),)
  last = cluster.attempts[-1]
  if last.exit_code is None:
    return ()
  finish = _finish(cluster, last)
  if finish is not None:
    return (finish,)
  # Never longer than one backoff from now, even when the clock was set back.
  until_s = min(last.ended_s, now) + cluster.limits.backoff_s
  if now < until_s:
    return (Wait(until_s),)
  return (StartWorker(last.number + 1),)


def describe_end(attempt: Attempt) -> str:
  """Says how an attempt ended: 'killed by SIGKILL at step 7: out of ...'."""
  text = protocol.describe_exit(attempt.exit_code)
  if attempt.last_step is not None:
    text += f' at step {attempt.last_step}'
  return f'{text}: {attempt.error}' if attempt.error else text


def count_restarts(cluster: Cluster) -> int:
  """Counts this launch's restarts that were not due to a preemption."""
  return sum(
    attempt.exit_code != protocol.ExitCode.PREEMPTED
    for attempt in cluster.attempts[:-1]
  )


_NOT_HEALABLE = {
  protocol.ExitCode.USER_ERROR,
  protocol.ExitCode.NOT_FINITE,
  protocol.ExitCode.OUT_OF_MEMORY,
  protocol.ExitCode.DISK_FULL,
}


def _finish(cluster: Cluster, last: Attempt) -> Finish | None:
  limits = cluster.limits
  if last.exit_code == protocol.ExitCode.DONE:
    return Finish(protocol.ExitCode.DONE, 'done')
  if last.exit_code in _NOT_HEALABLE:
    text = last.error or (
      f'{protocol.describe_exit(last.exit_code)}; see {cluster.log_path}'
    )
    return Finish(last.exit_code, text)
  if cluster.stop_requested:
    return Finish(
      protocol.ExitCode.PREEMPTED,
      f'stopped as asked (the worker: {describe_end(last)}); the same command '
      'continues the run',
    )
  num_attempts = len(cluster.attempts)
  tail = (
    f'the last of {num_attempts} attempt{"s" if num_attempts > 1 else ""} '
    f'ended: {describe_end(last)}; see {cluster.log_path}'
  )
  fruitless = _count_fruitless_restarts(cluster)
  if fruitless >= limits.max_restarts_without_progress:
    reached = (
      'any step'
      if cluster.best_step is None
      else f'a step beyond {cluster.best_step}'
    )
    return Finish(
      protocol.ExitCode.NO_PROGRESS,
      f'{fruitless} restarts in a row did not reach {reached} '
      '(launch.max_restarts_without_progress='
      f'{limits.max_restarts_without_progress}); {tail}',
    )
  # A preempted worker is restarted whatever the number of restarts before.
  if (
    last.exit_code != protocol.ExitCode.PREEMPTED
    and count_restarts(cluster) >= limits.max_restarts
  ):
    return Finish(
      protocol.ExitCode.RETRIES_EXHAUSTED,
      f'the restarts are used up (launch.max_restarts={limits.max_restarts}); '
      f'{tail}',
    )
  return None


def _count_fruitless_restarts(cluster: Cluster) -> int:
  count = 0
  for attempt in reversed(cluster.attempts[1:]):
    if attempt.made_progress:
      break
    count += 1
  return count


def _on_run_started(cluster: Cluster, event: protocol.Event) -> Cluster:
  del event
  return dataclasses.replace(
    cluster, attempts=(), stop_requested=False, ended=False
  )


def _on_worker_started(cluster: Cluster, event: protocol.Event) -> Cluster:
  attempt = Attempt(number=event.data['attempt'], started_s=event.time_s)
  return dataclasses.replace(cluster, attempts=(*cluster.attempts, attempt))


def _on_progress(cluster: Cluster, event: protocol.Event) -> Cluster:
  if event.step is None or not cluster.attempts:
    return cluster
  attempt = cluster.attempts[-1]
  first_step = attempt.first_step
  cluster = _with_last(
    cluster,
    first_step=event.step if first_step is None else first_step,
    last_step=event.step,
  )
  if cluster.best_step is not None and event.step <= cluster.best_step:
    return cluster
  return dataclasses.replace(
    _with_last(cluster, made_progress=True), best_step=event.step
  )


def _on_restored(cluster: Cluster, event: protocol.Event) -> Cluster:
  if event.step is None or not cluster.attempts:
    return cluster
  return _with_last(cluster, first_step=event.step)


def _on_checkpoint(cluster: Cluster, event: protocol.Event) -> Cluster:
  best = cluster.best_checkpoint
  if event.step is None or not cluster.attempts:
    return cluster
  if best is not None and event.step <= best:
    return cluster
  return dataclasses.replace(
    _with_last(cluster, made_progress=True), best_checkpoint=event.step
  )


def _on_error(cluster: Cluster, event: protocol.Event) -> Cluster:
  if not cluster.attempts:
    return cluster
  return _with_last(cluster, error=event.data['text'])


def _on_worker_exited(cluster: Cluster, event: protocol.Event) -> Cluster:
  if not cluster.attempts:
    return cluster
  lines = event.data['log_tail'].split('\n')
  return _with_last(
    cluster,
    exit_code=event.data['exit_code'],
    ended_s=event.time_s,
    error=cluster.attempts[-1].error or lines[-1],
  )


def _on_decision(cluster: Cluster, event: protocol.Event) -> Cluster:
  if event.data['action'] != 'stop':
    return cluster
  return dataclasses.replace(cluster, stop_requested=True)


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
  protocol.EventKind.WORKER_STARTED: _on_worker_started,
  protocol.EventKind.PROGRESS: _on_progress,
  protocol.EventKind.RESTORED: _on_restored,
  protocol.EventKind.CHECKPOINT_SAVED: _on_checkpoint,
  protocol.EventKind.ERROR: _on_error,
  protocol.EventKind.WORKER_EXITED: _on_worker_exited,
  protocol.EventKind.DECISION: _on_decision,
  protocol.EventKind.RUN_ENDED: _on_run_ended,
}
