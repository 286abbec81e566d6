"""Trains, and keeps training: `python -m launch.main --config=FILE`.

Reads the flags, binds the config to a workdir, and hands over to the
controller. Kept short: what it starts is in `launch.control` and
`launch.worker`, where it can be tested.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import re
import signal
import sys

from absl import flags

from launch.control import agent as agent_lib
from launch.control import cluster as cluster_lib
from launch.control import config_file
from launch.control import console as console_lib
from launch.control import controller as controller_lib
from launch.control import environment
from launch.control import journal as journal_lib
from launch.control import policy
from launch.control import protocol
from launch.control import run_config
from launch.control import status
from launch.control import workdir_lock

_HELP = """\
Trains what a config file says, restarts after a crash, resumes when started
again. Uses: python -m launch.main [status] --config=FILE [--workdir=DIR]

  --config=FILE         a Python file with get_config(); FILE:ARG passes ARG
  --config.KEY=VALUE    sets a key of the config, e.g. --config.train.steps=50
                        or --config.data.train[0].weight=2
  --workdir=DIR         where everything of the run goes; default
                        runs/<name of the config file>
  --processes=N         worker processes on this host; default 1, which uses
                        all of its devices
  status                instead of training, tells how the run in --workdir
                        is doing

Example:
  python -m launch.main --config=configs/quickstart.py --workdir=runs/first
  python -m launch.main status --workdir=runs/first

The same command on the same workdir continues the run. Ctrl-C (or SIGTERM)
saves and ends; a second Ctrl-C ends at once.

Exit codes:
  0   done
  1   the journal or another file of the launcher cannot be written
  2   a setting, a path or the data is wrong
  10  the loss or the gradients are not finite
  11  out of device or host memory
  12  the disk is full
  13  stopped as asked; the same command continues
  14  several restarts in a row made no progress
  15  the restarts are used up
  16  (of a worker) another process of the run died or hung
"""


def main(argv: Sequence[str]) -> int:
  """Runs the command line and returns the exit code."""
  worker = (sys.executable, '-m', 'launch.worker')
  return run(argv, worker)


def run(argv: Sequence[str], worker_command: Sequence[str]) -> int:
  """Runs the command line with a worker of one's choice.

  Args:
    argv: the program's name, then flags.
    worker_command: `--workdir=DIR --events_fd=N` is appended.

  Returns:
    An exit code of `protocol.ExitCode`.
  """
  if any(arg in _HELP_FLAGS for arg in argv[1:]):
    print(_HELP, end='')
    return protocol.ExitCode.DONE
  with contextlib.ExitStack() as stack:
    try:
      arguments = _parse(argv)
      if arguments.subcommand == 'status':
        console_lib.write_line(status.describe(arguments.workdir), sys.stdout)
        return protocol.ExitCode.DONE
      launch = _prepare(arguments, worker_command, stack)
    except ValueError as error:
      return _fail(protocol.ExitCode.USER_ERROR, str(error))
    except OSError as error:
      return _fail(*_explain(error, protocol.ExitCode.USER_ERROR))
    except KeyboardInterrupt:
      return _fail(protocol.ExitCode.PREEMPTED, 'interrupted before the start')
    try:
      finish = launch()
    except OSError as error:
      return _fail(*_explain(error, protocol.ExitCode.CRASHED))
  if finish.exit_code == protocol.ExitCode.DONE:
    return protocol.ExitCode.DONE
  return _fail(finish.exit_code, finish.reason)


_HELP_FLAGS = ('-h', '-help', '--help', '--helpshort', '--helpfull', '-?')

_OVERRIDE = re.compile(r'--?(no)?config\.')

# Beyond so many unread events the worker waits.
_MAX_UNREAD_EVENTS = 1000


@dataclasses.dataclass(frozen=True)
class _Arguments:
  subcommand: str | None
  config: str | None
  overrides: tuple[str, ...]
  workdir: str
  processes: int


def _parse(argv: Sequence[str]) -> _Arguments:
  flag_values = flags.FlagValues()
  flags.DEFINE_string('config', None, 'config file', flag_values=flag_values)
  flags.DEFINE_string('workdir', None, 'directory', flag_values=flag_values)
  flags.DEFINE_integer(
    'processes', 1, 'workers', lower_bound=1, flag_values=flag_values
  )
  overrides = tuple(arg for arg in argv[1:] if _OVERRIDE.match(arg))
  rest = [arg for arg in argv if arg not in overrides]
  try:
    positional = flag_values(rest)[1:]
  except flags.Error as error:
    raise ValueError(f'{" ".join(str(error).split())} (see --help)') from error
  config, workdir = flag_values['config'].value, flag_values['workdir'].value
  if positional not in ([], ['status']):
    raise ValueError(
      f'{" ".join(positional)!r} is no subcommand; the only one is `status`, '
      'and every setting is written --name=value'
    )
  subcommand = positional[0] if positional else None
  if not config and not (subcommand and workdir):
    raise ValueError(
      'no --config was given; pass --config=FILE, e.g. '
      '--config=configs/quickstart.py'
      + (', or --workdir=DIR' if subcommand else '')
    )
  if workdir is None:
    stem = pathlib.PurePath(config.split(':', 1)[0]).stem
    workdir = os.path.join('runs', stem)
  if not workdir or '://' in workdir:
    raise ValueError(
      f'--workdir is {workdir!r}; pass a local directory, e.g. runs/first'
    )
  # The shell leaves the ~ of --workdir=~/run as it is.
  return _Arguments(
    subcommand,
    config,
    overrides,
    os.path.expanduser(workdir),
    flag_values['processes'].value,
  )


def _prepare(
  arguments: _Arguments,
  worker_command: Sequence[str],
  stack: contextlib.ExitStack,
) -> Callable[[], policy.Finish]:
  """Checks everything, and returns what runs the launch."""
  workdir = arguments.workdir
  config = config_file.load(arguments.config)
  config_file.override(config, arguments.overrides)
  settings = run_config.launch_settings(config)
  plain = run_config.to_plain(config)
  _make_workdir(workdir)
  lock = workdir_lock.WorkdirLock(workdir)
  stack.callback(lock.release)
  run_config.bind(workdir, plain)
  num_cores = run_config.recorded_num_cores(
    workdir, os.environ, arguments.processes
  )
  if os.environ.get('NPROC', str(num_cores)) != str(num_cores):
    console_lib.write_line(
      f'warning: NPROC={os.environ["NPROC"]} is ignored: this run began with '
      f'{num_cores} cores, and another number would change its bits',
      sys.stderr,
    )
  lock.write_owner(worker_pids=[])
  journal = journal_lib.Journal(os.path.join(workdir, 'journal.sqlite'))
  stack.callback(journal.close)
  cluster = cluster_lib.Cluster(limits=settings.limits, workdir=workdir)
  for event in journal.read_all():
    cluster = cluster_lib.fold(cluster, event)
  mailbox = controller_lib.Mailbox(_MAX_UNREAD_EVENTS)
  agent = _agent(arguments, settings, num_cores, worker_command, lock, mailbox)
  console = console_lib.Console(workdir, sys.stdout, sys.stderr)
  stack.callback(console.close)
  controller = controller_lib.Controller(
    cluster=cluster,
    grace_s=settings.grace_s,
    journal=journal,
    agent=agent,
    mailbox=mailbox,
    show=console.show,
  )
  _catch_signals(mailbox, stack)
  return lambda: controller.run(launcher_pid=os.getpid(), num_cores=num_cores)


def _agent(
  arguments: _Arguments,
  settings: run_config.LaunchSettings,
  num_cores: int,
  worker_command: Sequence[str],
  lock: workdir_lock.WorkdirLock,
  mailbox: controller_lib.Mailbox,
) -> agent_lib.Agent:
  workdir = arguments.workdir
  worker_environment = environment.of_worker(
    os.environ,
    num_cores=num_cores,
    gpus=None,
    collective_timeout_s=settings.collective_timeout_s,
    deterministic=settings.deterministic,
  )
  return agent_lib.Agent(
    command=(
      *worker_command,
      f'--workdir={os.path.abspath(workdir)}',
      f'--join_timeout_s={settings.join_timeout_s}',
    ),
    environments=[worker_environment] * arguments.processes,
    log_path=functools.partial(protocol.worker_log, workdir),
    lock_fd=lock.fd,
    on_worker_pids=lock.write_owner,
    deliver=mailbox.put,
  )


def _make_workdir(workdir: str) -> None:
  try:
    os.makedirs(workdir, exist_ok=True)
  except (FileExistsError, NotADirectoryError) as error:
    raise ValueError(
      f'--workdir={workdir} cannot be a directory, for it or one above it is a '
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


def _explain(error: OSError, otherwise: int) -> tuple[int, str]:
  text = f'{error.strerror or error}'
  if error.filename is not None:
    text += f': {error.filename}'
  if error.errno in (errno.ENOSPC, errno.EDQUOT):
    return (
      protocol.ExitCode.DISK_FULL,
      f'{text}; free some space and run the same command again',
    )
  return otherwise, f'{text}; correct it, or pass another --workdir'


def _fail(exit_code: int, text: str) -> int:
  console_lib.write_line(f'error: {" ".join(text.split())}', sys.stderr)
  return exit_code


if __name__ == '__main__':
  sys.exit(main(sys.argv))
