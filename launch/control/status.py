"""Tells what a workdir's journal says about its run, while it runs or after."""

import os
import time

from launch.control import cluster as cluster_lib
from launch.control import journal
from launch.control import protocol
from launch.control import workdir_lock

_NUM_LAST_EVENTS = 8


def describe(workdir: str) -> str:
  """Describes a run in a few lines.

  Args:
    workdir: of a run that was started at least once.

  Returns:
    State, step, restarts, checkpoint, the last events, and where things lie.

  Raises:
    ValueError: when there is no journal, or a damaged one.
    OSError: when it cannot be read.
  """
  # The lock is read first: a run that ends in between reads as ended.
  locked = workdir_lock.is_locked(workdir)
  events = journal.read(os.path.join(workdir, 'journal.sqlite'))
  # Limits bound decisions, and none is taken here.
  limits = cluster_lib.Limits(0, 0, 0.0, 0.0, 0.0)
  cluster = cluster_lib.Cluster(limits=limits, workdir=workdir, num_hosts=1)
  for event in events:
    cluster = cluster_lib.fold(cluster, event)
  lines = [
    f'workdir      {workdir}',
    f'state        {_state(cluster, events, locked)}',
    f'step         {_step(cluster)}',
    f'checkpoint   {_checkpoint(cluster)}',
    f'restarts     {max(0, len(cluster.attempts) - 1)} in this launch',
    f'worker log   {protocol.worker_log(workdir, 0)}',
    f'metrics      {os.path.join(workdir, "metrics.jsonl")}',
    f'checkpoints  {os.path.join(workdir, "checkpoints")}',
    f'journal      {os.path.join(workdir, "journal.sqlite")}',
    'last events:',
  ]
  return '\n'.join(lines + [_line(event) for event in _last(events)])


def _state(
  cluster: cluster_lib.Cluster, events: tuple[protocol.Event, ...], locked: bool
) -> str:
  if not events:
    return 'starting' if locked else 'never started'
  if cluster.ended:
    end = next(
      event
      for event in reversed(events)
      if event.kind == protocol.EventKind.RUN_ENDED
    )
    how = protocol.describe_exit(end.data['exit_code'])
    text = _one_line(end.data['text'])
    return how if text == how else f'{how}: {text}'
  if not locked:
    return 'broken off: its launcher died; the same command continues the run'
  if not cluster.attempts:
    return 'starting'
  last = cluster.attempts[-1]
  if last.ended_s is not None:
    return f'restarting (the worker ended: {cluster_lib.describe_end(last)})'
  if cluster.stop_requested:
    return 'stopping'
  return f'running, attempt {last.number} since {_clock(last.started_s)}'


def _checkpoint(cluster: cluster_lib.Cluster) -> str:
  if cluster.best_checkpoint is None:
    return 'none yet'
  return f'step {cluster.best_checkpoint}'


def _step(cluster: cluster_lib.Cluster) -> str:
  # The journal's progress may be 10 s old, its checkpoints are not.
  steps = (cluster.best_step, cluster.best_checkpoint)
  known = [step for step in steps if step is not None]
  return str(max(known)) if known else 'none yet'


def _last(events: tuple[protocol.Event, ...]) -> list[protocol.Event]:
  """The last few events, with one PROGRESS at most: the latest."""
  kept, seen_progress = [], False
  for event in reversed(events):
    is_progress = event.kind == protocol.EventKind.PROGRESS
    if is_progress and seen_progress:
      continue
    seen_progress |= is_progress
    kept.append(event)
    if len(kept) == _NUM_LAST_EVENTS:
      break
  return kept[::-1]


def _line(event: protocol.Event) -> str:
  step = '' if event.step is None else f' step {event.step}'
  data = event.data
  match event.kind:
    case protocol.EventKind.WORKER_EXITED:
      text = protocol.describe_exit(data['exit_code'])
    case protocol.EventKind.PHASE:
      text = f'{data["name"]}, {data["total"]} {data["unit"]}'
    case _:
      text = str(data.get('text', ''))
  line = f'  {_clock(event.time_s)}  {event.kind.value}{step}  {text}'
  return _one_line(line, indent='  ')


def _clock(time_s: float) -> str:
  return time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time_s))


def _one_line(text: str, indent: str = '') -> str:
  return indent + ' '.join(text.split())[:300]
