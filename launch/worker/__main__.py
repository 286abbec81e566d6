"""The worker process: prepares the data, trains, samples, sums up.

The agent starts it as `python -m launch.worker --workdir=DIR --events_fd=N`,
with the flags that name it among the processes of the run.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import traceback

import jax

from launch.control.protocol import EventKind
from launch.control.protocol import ExitCode
from launch.worker import agreement
from launch.worker import checkpoint
from launch.worker import closing
from launch.worker import durable
from launch.worker import loop
from launch.worker import outcome
from launch.worker import processes
from launch.worker import program
from launch.worker import read_data
from launch.worker import reporter as reporter_lib
from launch.worker import run_settings


def main() -> int:
  """Runs the workdir's config to its end; returns the exit code."""
  arguments = _parse()
  reporter = reporter_lib.Reporter(arguments.events_fd, arguments.process)
  try:
    _run(arguments, reporter)
  except Exception as error:
    exit_code, text = outcome.describe(error)
    details = traceback.format_exc()
    reporter.send(
      EventKind.ERROR,
      text=text,
      exit_code=int(exit_code),
      traceback=details if exit_code == ExitCode.CRASHED else '',
    )
    with contextlib.suppress(OSError):  # the log may be on the full disk
      print(details, file=sys.stderr, flush=True)
    return int(exit_code)
  return int(ExitCode.DONE)


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', required=True, help='directory of the run')
  parser.add_argument(
    '--events_fd', type=int, required=True, help='pipe to the agent'
  )
  parser.add_argument(
    '--process', type=int, required=True, help='number of this one, from 0'
  )
  parser.add_argument(
    '--processes', type=int, required=True, help='of the whole run'
  )
  parser.add_argument(
    '--coordinator', required=True, help="the first one's ADDRESS:PORT"
  )
  parser.add_argument(
    '--bind', required=True, help='ADDRESS:PORT where the first one listens'
  )
  parser.add_argument(
    '--join_timeout_s', type=float, required=True, help='wait for the others'
  )
  return parser.parse_args()


def _run(
  arguments: argparse.Namespace, reporter: reporter_lib.Reporter
) -> None:
  workdir, timeout_s = arguments.workdir, arguments.join_timeout_s
  stop = loop.StopRequest(reporter)

  def dropped(step: int, reason: str) -> None:
    reporter.send(EventKind.CHECKPOINT_DROPPED, step=step, text=reason)

  with outcome.before_the_first_step():
    with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as file:
      settings = run_settings.from_plain(json.load(file))
    processes.join(
      arguments.process,
      arguments.processes,
      arguments.coordinator,
      arguments.bind,
      timeout_s,
    )
    _keep_compiled_programs(settings.log.compilation_cache_dir)
    program.check(settings)
    data = _prepare_data(workdir, settings, reporter, stop)
    processes.wait_for_all('data', timeout_s)
    checkpoints = checkpoint.Checkpoints(
      os.path.join(workdir, 'checkpoints'),
      settings.checkpoint,
      dropped,
    )
  job = loop.Job(
    workdir, settings, data, checkpoints, reporter, stop, timeout_s
  )
  with contextlib.closing(checkpoints):
    trained = loop.train(job)
  closing.sample(job, trained)
  if agreement.is_first():
    closing.summarize(job, trained)
  processes.leave()


def _prepare_data(
  workdir: str,
  settings: run_settings.RunSettings,
  reporter: reporter_lib.Reporter,
  stop: loop.StopRequest,
) -> read_data.Data:
  """Makes or finds the token caches; refuses data the run did not begin on."""
  current = [None, 0.0]  # name of the phase, time of its last report

  def report(name: str, done: int, total: int, unit: str) -> None:
    if stop:
      raise outcome.Preempted(f'stopped while {name}; what is done is kept')
    if name != current[0]:
      current[0] = name
      reporter.send(EventKind.PHASE, name=name, total=total, unit=unit, start=0)
    elif done < total and time.monotonic() - current[1] < 0.2:
      return
    current[1] = time.monotonic()
    reporter.send(EventKind.PROGRESS, done=done)

  with processes.first_one_first('the data', stop):
    data = read_data.prepare(
      settings.data,
      settings.model.vocab_size,
      report,
      lambda text: reporter.send(EventKind.MESSAGE, text=text),
    )
    if agreement.is_first():
      _bind_data(workdir, data)
  return data


def _bind_data(workdir: str, data: read_data.Data) -> None:
  """Remembers what the run trains on, or refuses anything else."""
  path = os.path.join(workdir, 'data.json')
  saved = durable.read_json(path)
  if saved is None:
    durable.write_json(path, data.manifest)
  elif differences := read_data.compare_manifests(saved, data.manifest):
    raise ValueError(
      f'the data is not what {workdir} began with: {"; ".join(differences[:5])}'
      f'{" ..." if len(differences) > 5 else ""}; restore it, or begin anew in'
      ' another --workdir'
    )
  data.tokenizer.save(os.path.join(workdir, 'tokenizer.json'))


def _keep_compiled_programs(directory: str) -> None:
  """A restart then loads its programs instead of compiling them again."""
  # On CPU a program that comes from the cache runs its collectives in an order
  # of its own, which differs from that of a process that has compiled it.
  on_cpu = jax.default_backend() == 'cpu'
  if not directory or (on_cpu and jax.process_count() > 1):
    return
  jax.config.update('jax_compilation_cache_dir', os.path.expanduser(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def _end(exit_code: int) -> None:
  sys.stdout.flush()
  sys.stderr.flush()
  if exit_code != ExitCode.DONE:
    # At exit, jax would wait for processes that wait for this one.
    os._exit(exit_code)


if __name__ == '__main__':
  _end(main())
