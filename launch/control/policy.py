"""What to do next, as a pure function of what is known.

The workers of a run live and die together: when one crashed, was killed or was
preempted, the others get a moment to end by themselves and are killed, and all
are started again. Two budgets bound this: the restarts of a launch (preemptions
are free), and the restarts in a row that got no further than the run had ever
been (preemptions count, or a worker that is preempted at once would be
restarted for ever). Every other exit code would only come back, so the run
finishes with it.

No clock, no files: `now` is an argument.
"""

import dataclasses

from launch.control import cluster as cluster_lib
from launch.control import protocol


@dataclasses.dataclass(frozen=True)
class StartWorkers:
  """Start all workers now: so many at each place, numbered in this order."""

  attempt: int
  hosts: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class KillWorkers:
  """Kill the workers that still live, for the given reason."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Promote:
  """Give a standby the place of a host that is gone."""

  standby: str
  place: str


@dataclasses.dataclass(frozen=True)
class Wait:
  """Do nothing before `until_s`, in seconds since 1970."""

  until_s: float


@dataclasses.dataclass(frozen=True)
class Finish:
  """End the launch with an exit code and a line that says why."""

  exit_code: int
  reason: str


Action = StartWorkers | KillWorkers | Promote | Wait | Finish


def decide(cluster: cluster_lib.Cluster, now: float) -> tuple[Action, ...]:
  """Says what to do.

  Args:
    cluster: what is known.
    now: seconds since 1970.

  Returns:
    Nothing after the end or while workers are ending; else one action.
  """
  if cluster.ended:
    return ()
  if not cluster.attempts:
    if cluster.stop_requested:
      return (Finish(protocol.ExitCode.PREEMPTED, 'stopped as asked'),)
    return (_start(cluster, 1, now),)
  last = cluster.attempts[-1]
  if last.ended_s is None:
    cause = last.cause
    if cause is None or cause.exit_code == protocol.ExitCode.DONE:
      return _end_stuck(cluster, last, now)
    return _end_together(last, now)
  finish = _finish(cluster, last)
  if finish is not None:
    return (finish,)
  # Never longer than one backoff from now, even when the clock was set back.
  until_s = min(last.ended_s, now) + cluster.limits.backoff_s
  if now < until_s:
    return (Wait(until_s),)
  return (_start(cluster, last.number + 1, now),)


def count_restarts(cluster: cluster_lib.Cluster) -> int:
  """Counts this launch's restarts that were not due to a preemption."""
  return sum(
    attempt.cause.exit_code != protocol.ExitCode.PREEMPTED
    for attempt in cluster.attempts[:-1]
  )


def _start(cluster: cluster_lib.Cluster, attempt: int, now: float) -> Action:
  """Starts the workers once every host is there."""
  places = [f'host {number}' for number in range(cluster.num_hosts)]
  missing = [place for place in places if place not in cluster.hosts]
  if not missing:
    hosts = tuple((place, cluster.hosts[place]) for place in places)
    return StartWorkers(attempt, hosts)
  standbys = [place for place in cluster.hosts if place not in places]
  # At the start a host is late; only later it is lost.
  if standbys and attempt > 1:
    return Promote(standbys[0], missing[0])
  until_s = min(now, cluster.missing_since_s) + cluster.limits.join_timeout_s
  if now < until_s:
    return Wait(until_s)
  return Finish(
    protocol.ExitCode.PEER_LOST
    if attempt == 1
    else protocol.ExitCode.HOST_LOST,
    f'{", ".join(missing)} of {cluster.num_hosts} hosts did not join within'
    f' {cluster.limits.join_timeout_s:g} s (launch.join_timeout_s): start the'
    ' same command there, or see what its launcher says',
  )


# How long the other workers may take to end after the first: one that crashed
# breaks their collectives at once, one that was preempted has them saved.
_CRASHED_GRACE_S = 5.0
_PREEMPTED_GRACE_S = 60.0


def _end_together(
  attempt: cluster_lib.Attempt, now: float
) -> tuple[Action, ...]:
  """What to do with workers that outlive another one."""
  cause = attempt.cause
  if attempt.killing:
    return ()
  preempted = cause.exit_code == protocol.ExitCode.PREEMPTED
  grace_s = _PREEMPTED_GRACE_S if preempted else _CRASHED_GRACE_S
  until_s = min(now, *(each.time_s for each in attempt.exits)) + grace_s
  if now < until_s:
    return (Wait(until_s),)
  return (
    KillWorkers(f'killing the others: {cluster_lib.describe_end(attempt)}'),
  )


# A step may take so many times the longest one before it, and in any case this
# share of the timeout: a first evaluation or a slow disk is no hang.
_PATIENCE = 20
_LEAST_SHARE = 1 / 6


def _end_stuck(
  cluster: cluster_lib.Cluster, attempt: cluster_lib.Attempt, now: float
) -> tuple[Action, ...]:
  """What to do with workers that live and say nothing."""
  if attempt.killing or cluster.stop_requested:
    return ()  # when they are asked to stop, the controller has its grace
  limit_s = cluster.limits.stuck_timeout_s
  longest_s = max(attempt.step_gaps_s, default=None)
  if longest_s is not None:
    limit_s = min(limit_s, max(_LEAST_SHARE * limit_s, _PATIENCE * longest_s))
  until_s = min(now, attempt.heard_s) + limit_s
  if now < until_s:
    return (Wait(until_s),)
  step = attempt.last_step
  where = '' if step is None else f' after step {step}'
  known = (
    '' if longest_s is None else f'; no step before took {longest_s:.1f} s'
  )
  return (
    KillWorkers(
      f'the workers are stuck{where}: no sign of work for {limit_s:.0f} s'
      f'{known}'
    ),
  )


def _finish(
  cluster: cluster_lib.Cluster, last: cluster_lib.Attempt
) -> Finish | None:
  limits, cause = cluster.limits, last.cause
  log = protocol.worker_log(cluster.workdir, cause.process)
  if cause.exit_code == protocol.ExitCode.DONE:
    return Finish(protocol.ExitCode.DONE, 'done')
  if cause.exit_code in cluster_lib.NOT_HEALABLE:
    how = protocol.describe_exit(cause.exit_code)
    return Finish(cause.exit_code, cause.error or f'{how}; see {log}')
  if cluster.stop_requested:
    return Finish(
      protocol.ExitCode.PREEMPTED,
      f'stopped as asked (the worker: {cluster_lib.describe_end(last)}); the '
      'same command continues the run',
    )
  num_attempts = len(cluster.attempts)
  tail = (
    f'the last of {num_attempts} attempt{"s" if num_attempts > 1 else ""} '
    f'ended: {cluster_lib.describe_end(last)}; see {log}'
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
    cause.exit_code != protocol.ExitCode.PREEMPTED
    and count_restarts(cluster) >= limits.max_restarts
  ):
    return Finish(
      protocol.ExitCode.RETRIES_EXHAUSTED,
      f'the restarts are used up (launch.max_restarts={limits.max_restarts}); '
      f'{tail}',
    )
  return None


def _count_fruitless_restarts(cluster: cluster_lib.Cluster) -> int:
  count = 0
  for attempt in reversed(cluster.attempts[1:]):
    if attempt.made_progress:
      break
    count += 1
  return count
