"""Throughput of 1, 2 and 4 processes with equal work for each.

  python -m benchmarks.weak_scaling

Starts whole runs (`launch.main --processes=N`) whose batch grows with the
number of processes, and reads the step times from their logs. Efficiency is a
process's share of the tokens per second, of that of one process alone. Where
processes share cores it cannot be 1: N processes on C cores have C / N of a
core each, and the table says what is left of that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

# Compilation and first steps.
_WARM_UP_STEPS = 5


def main() -> None:
  """Prints one line per number of processes."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--config', default='configs/quickstart.py')
  parser.add_argument('--processes', default='1,2,4')
  parser.add_argument('--rows', type=int, default=8, help='of one process')
  parser.add_argument('--steps', type=int, default=25)
  parser.add_argument('--rounds', type=int, default=2)
  flags = parser.parse_args()
  counts = [int(text) for text in flags.processes.split(',')]
  cores = len(os.sched_getaffinity(0))
  print(
    f'{flags.config}, {flags.rows} rows for each process, NPROC=1,'
    f' {cores} cores; medians of {flags.steps - _WARM_UP_STEPS} steps in each'
    f' of {flags.rounds} rounds, in turn'
  )
  rates = {count: [] for count in counts}
  for _ in range(flags.rounds):
    for count in counts:
      rates[count].append(_tokens_per_s(flags, count))
  alone = statistics.median(rates[counts[0]]) / counts[0]
  print('processes  tokens/s (min..max)   efficiency  of the cores there are')
  for count in counts:
    rate = statistics.median(rates[count])
    efficiency = rate / count / alone
    share = efficiency / min(1.0, cores / count)
    spread = f'{rate:.0f} ({min(rates[count]):.0f}..{max(rates[count]):.0f})'
    print(f'{count:9}  {spread:20} {efficiency:10.0%}  {share:21.0%}')


def _tokens_per_s(flags: argparse.Namespace, processes: int) -> float:
  """Median over the steps of one run."""
  with tempfile.TemporaryDirectory() as workdir:
    subprocess.run(
      [
        *(sys.executable, '-m', 'launch.main', f'--config={flags.config}'),
        *(f'--workdir={workdir}/run', f'--processes={processes}'),
        f'--config.train.batch_size={flags.rows * processes}',
        f'--config.train.steps={flags.steps}',
        '--config.optimizer.warmup_steps=0',
        '--config.evaluate.every=0',
        '--config.checkpoint.every=100000',
        '--config.log.tensorboard=False',
        '--config.sample.prompts=()',
      ],
      check=True,
      stdout=subprocess.DEVNULL,
      env={**os.environ, 'NPROC': '1'},
    )
    with open(os.path.join(workdir, 'run', 'metrics.jsonl')) as file:
      records = [json.loads(line) for line in file]
  return statistics.median(
    record['timings']['tokens_per_s'] for record in records[_WARM_UP_STEPS:]
  )


if __name__ == '__main__':
  main()
