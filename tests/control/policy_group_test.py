"""Decisions for several workers and hosts, which live and die together."""

import itertools

import pytest

from launch.control import cluster
from launch.control import policy
from launch.control import protocol
from tests.control.folded_run import LIMITS
from tests.control.folded_run import Run

Kind = protocol.EventKind
ExitCode = protocol.ExitCode


def test_workers_start_when_all_hosts_are_there():
  run = Run(processes=2, hosts=3)
  run.join('host 2')
  assert run.decide() == (policy.Wait(run.now + LIMITS.join_timeout_s),)
  run.join('host 1')
  hosts = (('host 0', 2), ('host 1', 2), ('host 2', 2))
  assert run.decide() == (policy.StartWorkers(1, hosts),)
  run.start()
  places = run.cluster.attempts[-1].places
  assert places == ('host 0',) * 2 + ('host 1',) * 2 + ('host 2',) * 2


def test_hosts_that_do_not_come_are_named():
  run = Run(hosts=4)
  run.join('host 2')
  run.join('standby 77')  # It does not stand in for one that is late.
  run.wait()
  (finish,) = run.decide()
  assert finish.exit_code == ExitCode.PEER_LOST
  assert finish.reason.startswith('host 1, host 3 of 4 hosts did not join')


def _lose_a_host(run):
  run.join('host 1')
  run.start()
  run.exit(ExitCode.PEER_LOST, process=0)
  run.tell(Kind.HOST_LOST, place='host 1', text='host 1 was not heard of')
  assert run.cluster.attempts[-1].ended_s == run.now
  end = cluster.describe_end(run.cluster.attempts[-1])
  assert end == 'process 1 host lost: host 1 was not heard of'
  run.exit(1, process=1)  # Told too late.
  assert cluster.describe_end(run.cluster.attempts[-1]) == end


def test_a_lost_host_may_come_back():
  run = Run(hosts=2)
  _lose_a_host(run)
  run.wait()
  (action,) = run.decide()
  assert isinstance(action, policy.Wait)
  run.join('host 1')
  hosts = (('host 0', 1), ('host 1', 1))
  assert run.decide() == (policy.StartWorkers(2, hosts),)


def test_a_lost_host_that_stays_away_ends_the_run():
  run = Run(hosts=2)
  _lose_a_host(run)
  run.wait()
  run.wait()
  (finish,) = run.decide()
  assert finish.exit_code == ExitCode.HOST_LOST


def test_a_standby_takes_the_place_of_a_lost_host():
  run = Run(hosts=2)
  run.join('standby 77')
  _lose_a_host(run)
  run.wait()
  assert run.decide() == (policy.Promote('standby 77', 'host 1'),)
  run.tell(
    Kind.DECISION,
    action='promote',
    text='',
    standby='standby 77',
    place='host 1',
  )
  hosts = (('host 0', 1), ('host 1', 1))
  assert run.decide() == (policy.StartWorkers(2, hosts),)


def test_workers_that_outlive_a_crash_get_a_moment_and_are_killed():
  run = Run(processes=3)
  run.start()
  run.reach(7)
  begun = run.now
  run.exit(128 + 11, process=1)
  run.now += 1
  run.exit(ExitCode.PEER_LOST, process=2)
  run.wait()
  assert begun < run.now < begun + 10
  (action,) = run.decide()
  assert isinstance(action, policy.KillWorkers)
  assert 'process 1 killed by SIGSEGV at step 7' in action.reason
  run.tell(Kind.DECISION, action='kill_workers', text=action.reason)
  assert run.decide() == ()
  run.exit(128 + 9, process=0)
  run.wait()
  assert run.decide() == (policy.StartWorkers(2, (('host 0', run.processes),)),)


def test_workers_that_end_together_are_not_killed():
  run = Run(processes=2)
  run.start()
  run.exit(ExitCode.DONE, process=1)
  (action,) = run.decide()
  assert isinstance(action, policy.Wait)
  run.exit(ExitCode.DONE, process=0)
  assert run.decide() == (policy.Finish(ExitCode.DONE, 'done'),)


@pytest.mark.parametrize('order', list(itertools.permutations(range(4))))
def test_the_cause_is_the_gravest_end_and_not_the_first(order):
  run = Run(processes=4)
  run.start()
  codes = (ExitCode.PEER_LOST, ExitCode.DISK_FULL, 1, ExitCode.PREEMPTED)
  run.say('the disk is full', ExitCode.DISK_FULL, process=1)
  for process in order:
    run.exit(codes[process], process=process)
  assert run.decide() == (
    policy.Finish(ExitCode.DISK_FULL, 'the disk is full'),
  )


def test_a_process_that_lost_its_peers_is_never_the_cause_of_its_peers_end():
  run = Run(processes=2)
  run.start()
  run.exit(
    128 + 6, 'F client.h:80] the JAX distributed service detected fatal errors.'
  )
  run.exit(1, 'Boom: it broke', process=1)
  end = cluster.describe_end(run.cluster.attempts[-1])
  assert end == 'process 1 crashed: Boom: it broke'
