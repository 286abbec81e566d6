"""What a launcher runs: a controller on the first host, a member elsewhere."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

from launch.control import agent as agent_lib
from launch.control import channel
from launch.control import cluster as cluster_lib
from launch.control import console as console_lib
from launch.control import controller as controller_lib
from launch.control import environment
from launch.control import fleet as fleet_lib
from launch.control import journal as journal_lib
from launch.control import placement as placement_lib
from launch.control import policy
from launch.control import protocol
from launch.control import run_config
from launch.control import workdir_lock

# Beyond so many unread events the workers wait.
_MAX_UNREAD_EVENTS = 1000


@dataclasses.dataclass(frozen=True)
class Job:
  """What a launcher was asked to run.

  Attributes:
    workdir: of the run; a directory that all hosts see.
    config: in its plain form.
    settings: the config's part for the control plane.
    placement: which launcher of the run this is.
    worker_command: the worker's; flags are appended.
  """

  workdir: str
  config: dict[str, Any]
  settings: run_config.LaunchSettings
  placement: placement_lib.Placement
  worker_command: Sequence[str]


def prepare(
  job: Job, stack: contextlib.ExitStack
) -> Callable[[], policy.Finish]:
  """Checks everything, and returns what runs the launch.

  Args:
    job: what to run.
    stack: gets what must be closed after the launch.

  Raises:
    ValueError: the user must change something; nothing has started.
    OSError: the workdir cannot be used.
  """
  if job.placement.host == 0:
    return _prepare_first(job, stack)
  return _prepare_other(job, stack)


def _prepare_first(
  job: Job, stack: contextlib.ExitStack
) -> Callable[[], policy.Finish]:
  workdir, settings, placement = job.workdir, job.settings, job.placement
  _make_directory(workdir)
  lock = workdir_lock.WorkdirLock(workdir)
  stack.callback(lock.release)
  run_config.bind(workdir, job.config)
  num_cores = _num_cores(job)
  lock.write_owner(worker_pids=[])
  journal = journal_lib.Journal(os.path.join(workdir, 'journal.sqlite'))
  stack.callback(journal.close)
  cluster = cluster_lib.Cluster(
    limits=settings.limits, workdir=workdir, num_hosts=placement.hosts
  )
  epoch = 1
  for event in journal.read_all():
    cluster = cluster_lib.fold(cluster, event)
    epoch += event.kind == protocol.EventKind.RUN_STARTED
  mailbox = controller_lib.Mailbox(_MAX_UNREAD_EVENTS)
  fleet = fleet_lib.Fleet(
    _agent(job, num_cores, lock, mailbox.put),
    _open_hub(job, epoch, mailbox.put),
    _address(placement.coordinator),
    _address(placement.bind),
  )
  console = console_lib.Console(workdir, sys.stdout, sys.stderr)
  stack.callback(console.close)
  controller = controller_lib.Controller(
    cluster=cluster,
    grace_s=settings.grace_s,
    journal=journal,
    fleet=fleet,
    mailbox=mailbox,
    show=console.show,
  )
  _catch_signals(mailbox, stack)
  return lambda: controller.run(launcher_pid=os.getpid(), num_cores=num_cores)


def _prepare_other(
  job: Job, stack: contextlib.ExitStack
) -> Callable[[], policy.Finish]:
  from launch.control import member as member_lib

  placement = job.placement
  name = 'standby' if placement.host is None else str(placement.host)
  if placement.host is None:
    name += f'-{os.uname().nodename}'
  directory = os.path.join(job.workdir, 'hosts', name)
  _make_directory(directory)
  lock = workdir_lock.WorkdirLock(directory)
  stack.callback(lock.release)
  lock.write_owner(worker_pids=[])
  # The first launcher makes it last, when everything else is there.
  secret = _wait_for_secret(job)
  num_cores = _num_cores(job)
  member = member_lib.Member(
    member_lib.Settings(
      coordinator=placement.coordinator,
      host=placement.host,
      secret=secret,
      digest=_digest(job.config),
      join_timeout_s=job.settings.limits.join_timeout_s,
      heartbeat_timeout_s=job.settings.heartbeat_timeout_s,
    ),
    lambda deliver: _agent(job, num_cores, lock, deliver),
    lambda text: console_lib.write_line(text, sys.stdout),
  )
  return member.run


def _open_hub(
  job: Job, epoch: int, deliver: Callable[[protocol.Event], None]
) -> Any:
  """The hub, which listens; None where no other launcher may come."""
  if not job.placement.bind:
    return None
  # aiohttp takes a quarter of a second to import, which one host need not wait.
  from launch.control import hub as hub_lib

  hub = hub_lib.Hub(
    secret=channel.make_secret(_secret_path(job)),
    epoch=epoch,
    hosts=job.placement.hosts,
    digest=_digest(job.config),
    heartbeat_timeout_s=job.settings.heartbeat_timeout_s,
    deliver=deliver,
  )
  address, port = placement_lib.split(job.placement.bind)
  try:
    hub.open(address, port)
  except OSError as error:
    raise ValueError(
      f'cannot listen at {job.placement.bind} ({error.strerror or error}): pass'
      ' --bind=ADDRESS:PORT with an address of this host and a free port'
    ) from error
  return hub


def _agent(
  job: Job,
  num_cores: int,
  lock: workdir_lock.WorkdirLock,
  deliver: Callable[[protocol.Event], None],
) -> agent_lib.Agent:
  settings, placement = job.settings, job.placement
  gpus = placement.devices or (None,) * placement.processes
  return agent_lib.Agent(
    command=(
      *job.worker_command,
      f'--workdir={os.path.abspath(job.workdir)}',
      f'--join_timeout_s={settings.limits.join_timeout_s}',
    ),
    environments=[
      environment.of_worker(
        os.environ,
        num_cores=num_cores,
        gpus=each,
        collective_timeout_s=settings.collective_timeout_s,
        deterministic=settings.deterministic,
      )
      for each in gpus
    ],
    log_path=functools.partial(protocol.worker_log, job.workdir),
    lock_fd=lock.fd,
    on_worker_pids=lock.write_owner,
    deliver=deliver,
  )


def _num_cores(job: Job) -> int:
  number = run_config.recorded_num_cores(
    job.workdir, os.environ, job.placement.processes
  )
  if os.environ.get('NPROC', str(number)) != str(number):
    console_lib.write_line(
      f'warning: NPROC={os.environ["NPROC"]} is ignored: this run began with '
      f'{number} cores, and another number would change its bits',
      sys.stderr,
    )
  return number


def _address(endpoint: str) -> str:
  """The address of 'ADDRESS:PORT'; loopback where no other host may come."""
  if not endpoint:
    return '127.0.0.1'
  address, _ = placement_lib.split(endpoint)
  return f'[{address}]' if ':' in address else address


def _digest(config: dict[str, Any]) -> str:
  text = json.dumps(config, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _secret_path(job: Job) -> str:
  return os.path.join(job.workdir, 'secret')


def _wait_for_secret(job: Job) -> bytes:
  path, timeout_s = _secret_path(job), job.settings.limits.join_timeout_s
  deadline = time.monotonic() + timeout_s
  while not os.path.exists(path):
    if time.monotonic() > deadline:
      raise ValueError(
        f'{path} did not appear within {timeout_s:g} s: start the first'
        ' launcher, and give all of them a --workdir on a file system they'
        ' share'
      )
    time.sleep(0.2)
  return channel.read_secret(path)


def _make_directory(path: str) -> None:
  try:
    os.makedirs(path, exist_ok=True)
  except (FileExistsError, NotADirectoryError) as error:
    raise ValueError(
      f'--workdir={path} cannot be a directory, for it or one above it is a '
      'file; pass another --workdir'
    ) from error


def _catch_signals(
  mailbox: controller_lib.Mailbox, stack: contextlib.ExitStack
) -> None:
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    # nohup ignores SIGHUP, and shells SIGINT for jobs in the background.
    if signal.getsignal(number) != signal.SIG_IGN:
      previous = signal.signal(number, lambda n, _: mailbox.put_signal(n))
      stack.callback(signal.signal, number, previous)
