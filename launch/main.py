"""Trains, and keeps training: `python -m launch.main --config=FILE`.

Reads the flags, binds the config to a workdir, and hands over to the
controller. Kept short: what it starts is in `launch.control` and
`launch.worker`, where it can be tested.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import sys

from absl import flags

from launch.control import config_file
from launch.control import console as console_lib
from launch.control import placement
from launch.control import protocol
from launch.control import roles
from launch.control import run_config
from launch.control import status

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
  --devices=0,1,...     GPUs of this host to use, shared out over its workers
  --hosts=N --host=I    this is number I (from 0) of N hosts, on each of which
                        the same command runs; Slurm, Open MPI and JobSet tell
                        it themselves (docs/CLUSTERS.md)
  --coordinator=A:PORT  where host 0 listens; --bind=A:PORT if that is another
                        address there
  --standby             this host takes the place of one that is lost
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
  16  another process of the run did not come, died or hung
  17  a host of the run stopped answering and did not come back
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
      launch = roles.prepare(_job(arguments, worker_command), stack)
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


@dataclasses.dataclass(frozen=True)
class _Arguments:
  subcommand: str | None
  config: str | None
  overrides: tuple[str, ...]
  workdir: str
  given: placement.Given


def _parse(argv: Sequence[str]) -> _Arguments:
  flag_values = flags.FlagValues()
  flags.DEFINE_string('config', None, 'config file', flag_values=flag_values)
  flags.DEFINE_string('workdir', None, 'directory', flag_values=flag_values)
  for name in ('hosts', 'host', 'processes'):
    flags.DEFINE_integer(name, None, 'see --help', flag_values=flag_values)
  for name in ('coordinator', 'bind', 'devices'):
    flags.DEFINE_string(name, None, 'see --help', flag_values=flag_values)
  flags.DEFINE_boolean('standby', False, 'see --help', flag_values=flag_values)
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
    placement.Given(
      **{
        field.name: flag_values[field.name].value
        for field in dataclasses.fields(placement.Given)
      }
    ),
  )


def _job(arguments: _Arguments, worker_command: Sequence[str]) -> roles.Job:
  config = config_file.load(arguments.config)
  config_file.override(config, arguments.overrides)
  return roles.Job(
    workdir=arguments.workdir,
    config=run_config.to_plain(config),
    settings=run_config.launch_settings(config),
    placement=placement.find(
      arguments.given,
      os.environ,
      placement.local_gpus('/dev'),
      placement.resolve,
    ),
    worker_command=worker_command,
  )


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
