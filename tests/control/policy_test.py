"""The decisions: heal what can be healed, and never without end."""

import dataclasses
import random
import signal

import pytest

from launch.control import cluster
from launch.control import policy
from launch.control import protocol
from tests.control.folded_run import LIMITS
from tests.control.folded_run import Run

Kind = protocol.EventKind
ExitCode = protocol.ExitCode

NOT_HEALABLE = (
  ExitCode.USER_ERROR,
  ExitCode.NOT_FINITE,
  ExitCode.OUT_OF_MEMORY,
  ExitCode.DISK_FULL,
)


@pytest.mark.parametrize('exit_code', NOT_HEALABLE)
def test_what_would_come_back_ends_the_run_at_once(exit_code):
  run = Run()
  run.start()
  run.say('the cause', exit_code)
  run.exit(exit_code)
  assert run.decide() == (policy.Finish(exit_code, 'the cause'),)


def test_done_ends_the_run_even_when_asked_to_stop():
  run = Run()
  run.start()
  run.ask_to_stop()
  run.exit(ExitCode.DONE)
  assert run.decide()[0].exit_code == ExitCode.DONE
  run.tell(Kind.RUN_ENDED, exit_code=0, text='done')
  assert run.decide() == ()


@pytest.mark.parametrize(
  'exit_code', [ExitCode.CRASHED, ExitCode.PREEMPTED, 128 + 9, 128 + 11, 77]
)
def test_the_rest_is_restarted_after_the_backoff(exit_code):
  run = Run()
  run.start()
  run.exit(exit_code)
  assert run.decide() == (policy.Wait(run.now + LIMITS.backoff_s),)
  run.wait()
  assert run.decide() == (policy.StartWorkers(2, (('host 0', run.processes),)),)


def test_a_clock_set_back_does_not_lengthen_the_wait():
  run = Run()
  run.start()
  run.exit(ExitCode.CRASHED)
  run.now -= 1e6
  assert run.decide() == (policy.Wait(run.now + LIMITS.backoff_s),)


@pytest.mark.parametrize('exit_code', [None, ExitCode.PREEMPTED, 128 + 15, 1])
def test_a_launcher_asked_to_stop_ends_preempted(exit_code):
  run = Run()
  if exit_code is None:
    run.ask_to_stop()
  else:
    run.start()
    run.ask_to_stop()
    assert run.decide() == ()
    run.exit(exit_code)
  assert run.decide()[0].exit_code == ExitCode.PREEMPTED


def test_a_disk_that_filled_up_while_stopping_is_not_hidden():
  run = Run()
  run.start()
  run.ask_to_stop()
  run.exit(ExitCode.DISK_FULL)
  assert run.decide()[0].exit_code == ExitCode.DISK_FULL


@pytest.mark.parametrize('exit_code', [1, 137, ExitCode.PREEMPTED])
def test_restarts_without_progress_are_counted(exit_code):
  run = Run()
  run.start()
  run.reach(50)
  run.exit(exit_code)
  for _ in range(LIMITS.max_restarts_without_progress):
    run.wait()
    run.start()
    run.reach(40)
    run.reach(50)
    run.exit(exit_code, log_tail='line 1\nBoom: it broke')
  (finish,) = run.decide()
  assert finish.exit_code == ExitCode.NO_PROGRESS
  for part in ('step beyond 50', '4 attempts', 'Boom', 'runs/x/worker.log'):
    assert part in finish.reason


@pytest.mark.parametrize('what', ['step', 'checkpoint'])
def test_progress_begins_the_count_anew(what):
  run = Run(dataclasses.replace(LIMITS, max_restarts=1000))
  run.start()
  run.reach(100)
  for attempt in range(20):
    run.exit(ExitCode.CRASHED)
    run.wait()
    run.start()
    if attempt % 3 == 0:
      if what == 'step':
        run.reach(101 + attempt)
      else:
        run.tell(Kind.CHECKPOINT_SAVED, step=10 + attempt)


def test_restarts_are_bounded_even_with_progress():
  run = Run()
  run.start()
  for step in range(LIMITS.max_restarts):
    run.reach(step)
    run.exit(137)
    run.wait()
    run.start()
  run.reach(1000)
  run.exit(137)
  (finish,) = run.decide()
  assert finish.exit_code == ExitCode.RETRIES_EXHAUSTED
  assert '6 attempts' in finish.reason
  assert 'SIGKILL' in finish.reason


def test_preemptions_with_progress_are_free():
  run = Run()
  run.start()
  for step in range(10 * LIMITS.max_restarts):
    run.reach(step)
    run.exit(ExitCode.PREEMPTED)
    run.wait()
    run.start()
  assert policy.count_restarts(run.cluster) == 0


@pytest.mark.parametrize(
  'limits',
  [
    dataclasses.replace(LIMITS, max_restarts=0),
    dataclasses.replace(LIMITS, max_restarts_without_progress=0),
  ],
)
def test_no_restart_means_none(limits):
  run = Run(limits)
  run.start()
  run.reach(5)
  run.exit(ExitCode.CRASHED)
  assert isinstance(run.decide()[0], policy.Finish)


def test_an_earlier_launch_uses_up_no_budget_but_its_steps_count():
  run = Run()
  run.start()
  run.reach(50)
  for _ in range(LIMITS.max_restarts_without_progress):
    run.exit(1)
    run.wait()
    run.start()
  run.exit(1)
  run.tell(Kind.RUN_ENDED, exit_code=14, text='')
  run.begin()
  run.start()
  run.reach(50)
  assert not run.cluster.attempts[-1].made_progress
  run.exit(1)
  run.wait()
  assert run.decide() == (policy.StartWorkers(2, (('host 0', run.processes),)),)


def test_a_launch_after_a_lost_one_starts_afresh():
  run = Run()
  run.start()
  run.ask_to_stop()
  run.begin()  # The launcher was killed: no RUN_ENDED.
  assert run.decide() == (policy.StartWorkers(1, (('host 0', 1),)),)


def _kill(run):
  (action,) = run.decide()
  assert isinstance(action, policy.KillWorkers)
  run.tell(Kind.DECISION, action='kill_workers', text=action.reason)
  assert run.decide() == ()
  run.exit(128 + 9)
  run.wait()
  assert isinstance(run.decide()[0], policy.StartWorkers)
  return cluster.describe_end(run.cluster.attempts[-1])


def test_workers_that_never_say_anything_are_stuck():
  run = Run()
  run.start()
  run.wait()
  assert run.now == 1000 + LIMITS.stuck_timeout_s
  assert 'are stuck: no sign of work for 1000 s' in _kill(run)


def test_every_sign_of_work_counts():
  run = Run()
  run.start()
  signs = [
    (Kind.PHASE, {'name': 'x', 'total': 1, 'unit': 'x', 'start': 0}),
    (Kind.PROGRESS, {'done': 1}),
    (Kind.MESSAGE, {'text': 'x'}),
    (Kind.RESTORED, {'step': 3}),
    (Kind.PROGRESS, {'done': 4, 'step': 4}),
    (Kind.CHECKPOINT_SAVED, {'step': 4}),
  ]
  for kind, data in signs:
    run.now += LIMITS.stuck_timeout_s - 1
    run.tell(kind, **data)
    assert run.decide() == (policy.Wait(run.now + LIMITS.stuck_timeout_s),)


def test_short_steps_shorten_the_patience_and_long_ones_do_not():
  run = Run()
  run.start()
  for step, gap_s in ((1, 5.0), (2, 0.1), (3, 10.0), (4, 0.1)):
    run.now += gap_s
    run.reach(step)
  told = run.now
  run.wait()
  assert run.now == pytest.approx(told + 200)
  end = _kill(run)
  assert end.endswith(
    'stuck after step 4: no sign of work for 200 s; no step before took 10.0 s'
  )
  run.start()
  for step in range(5, 9):
    run.reach(step)
  told = run.now
  run.wait()
  assert run.now == pytest.approx(told + LIMITS.stuck_timeout_s / 6)


def test_new_work_begins_with_full_patience():
  run = Run()
  run.start()
  for step in range(4):
    run.reach(step)
  run.tell(Kind.PHASE, name='sampling', total=1, unit='x', start=0)
  assert run.decide() == (policy.Wait(run.now + LIMITS.stuck_timeout_s),)


@pytest.mark.parametrize('seed', range(200))
def test_any_worker_is_handled_within_the_budgets(seed):
  """A worker that does anything at all: bounded, and never stuck."""
  rng = random.Random(seed)
  limits = cluster.Limits(
    max_restarts=rng.randrange(4),
    max_restarts_without_progress=rng.randrange(4),
    backoff_s=rng.choice([0.0, 0.5, 30.0]),
    join_timeout_s=1.0,
    stuck_timeout_s=1000.0,
  )
  run = Run(limits)
  codes = [0, 1, 2, 10, 11, 12, 13, 13, 13, 14, 77]
  codes += [128 + number for number in signal.Signals]
  weights = [1] * 5 + [1] + [20] * 3 + [10] * (len(codes) - 9)
  exits, num_starts, best = [], 0, -1
  stopped = False
  for _ in range(2000):
    actions = run.decide()
    attempts = run.cluster.attempts
    if attempts and attempts[-1].ended_s is None and not attempts[-1].killing:
      step = rng.randrange(best + 3)
      if rng.random() < 0.7 and best < 50:
        run.reach(step)
        best = max(best, step)
      else:
        exits.append(rng.choices(codes, weights)[0])
        run.exit(exits[-1])
      if rng.random() < 0.01:
        run.ask_to_stop()
        stopped = True
      continue
    (action,) = actions
    if isinstance(action, policy.Finish):
      break
    if isinstance(action, policy.Wait):
      assert run.now < action.until_s <= run.now + limits.backoff_s
      run.now += rng.uniform(0, 1) * limits.backoff_s + 1e-3
      continue
    assert not stopped
    assert not (exits and exits[-1] in (0, *NOT_HEALABLE))
    num_starts += 1
    assert action.attempt == num_starts == len(exits) + 1
    run.start()
  else:
    pytest.fail('it never finished')
  assert sum(code != 13 for code in exits[:-1]) <= limits.max_restarts
  if exits and exits[-1] in (0, *NOT_HEALABLE):
    assert action.exit_code == exits[-1]
  elif stopped:
    assert action.exit_code == ExitCode.PREEMPTED
  else:
    assert action.exit_code in (
      ExitCode.NO_PROGRESS,
      ExitCode.RETRIES_EXHAUSTED,
    )
