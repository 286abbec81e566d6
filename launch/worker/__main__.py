"""The worker process: prepares the data, trains, samples, sums up.

The agent starts it as `python -m launch.worker --workdir=DIR --events_fd=N`.
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
from launch.worker import checkpoint
from launch.worker import closing
from launch.worker import durable
from launch.worker import loop
from launch.worker import outcome
from launch.worker import read_data
from launch.worker import reporter as reporter_lib
from launch.worker import run_settings


def main() -> int:
  """Runs the workdir's config to its end; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', required=True, help='directory of the run')
  parser.add_argument(
    '--events_fd', type=int, required=True, help='pipe to the agent'
  )
  arguments = parser.parse_args()
  reporter = reporter_lib.Reporter(arguments.events_fd)
  try:
    _run(arguments.workdir, reporter)
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


def _run(workdir: str, reporter: reporter_lib.Reporter) -> None:
  stop = loop.StopRequest(reporter)

  def dropped(step: int, reason: str) -> None:
    reporter.send(EventKind.CHECKPOINT_DROPPED, step=step, text=reason)

  with outcome.before_the_first_step():
    with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as file:
      settings = run_settings.from_plain(json.load(file))
    _keep_compiled_programs(settings.log.compilation_cache_dir)
    loop.check(settings)
    data = _prepare_data(workdir, settings, reporter, stop)
    checkpoints = checkpoint.Checkpoints(
      os.path.join(workdir, 'checkpoints'),
      settings.checkpoint,
      dropped,
    )
  job = loop.Job(workdir, settings, data, checkpoints, reporter, stop)
  with contextlib.closing(checkpoints):
    trained = loop.train(job)
  closing.sample(job, trained)
  closing.summarize(job, trained)


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

  data = read_data.prepare(
    settings.data,
    settings.model.vocab_size,
    report,
    lambda text: reporter.send(EventKind.MESSAGE, text=text),
  )
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
  return data


def _keep_compiled_programs(directory: str) -> None:
  """A restart then loads its programs instead of compiling them again."""
  if not directory:
    return
  jax.config.update('jax_compilation_cache_dir', os.path.expanduser(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


if __name__ == '__main__':
  sys.exit(main())
