"""Tables and curves of what `benchmarks.compare_optimizers` has measured.

  python -m benchmarks.compare_report --results=DIR --plot=docs/optimizers.png

Prints Markdown: the sweep, the seeds, the ablations, as far as DIR has them.
"""

import argparse
import json
import pathlib
import statistics
from typing import Any

import jax
from matplotlib import figure

from benchmarks import compare_trials

_COLOURS = dict(
  zip(
    compare_trials.SWEEPS,
    ('#4a5568', '#2f855a', '#dd6b20', '#b7791f', '#2b6cb0'),
    strict=True,
  )
)


def main() -> None:
  """Prints the tables and draws the curves."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--results', required=True, type=pathlib.Path)
  parser.add_argument('--plot', type=pathlib.Path, help='PNG to write')
  flags = parser.parse_args()
  paths = sorted(flags.results.glob('*.json'))
  results = [json.loads(path.read_text()) for path in paths]
  if not results:
    raise SystemExit(f'{flags.results} holds no results: run a stage first')
  first = results[0]
  print(
    f'{first["parameters"]:,} parameters, {first["trial"]["steps"]} steps, jax'
    f' {first["jax"]}, here jax {jax.__version__}; validation nats per byte'
  )
  _sweep(results)
  best = _best(results)
  _seeds(best)
  _ablations(results, best)
  if flags.plot:
    _draw(best, flags.plot)


def _loss(result: dict[str, Any]) -> float:
  return result['validation_loss']


def _best(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
  """Per method, the runs of its best rate, one per seed."""
  found = {}
  for method in compare_trials.SWEEPS:
    runs = [r for r in results if r['trial']['method'] == method]
    first = [r for r in runs if r['trial']['seed'] == 0]
    if first:
      rate = min(first, key=_loss)['trial']['rate']
      found[method] = [r for r in runs if r['trial']['rate'] == rate]
  return found


def _sweep(results: list[dict[str, Any]]) -> None:
  print('\n| method | rate: loss |\n| --- | --- |')
  for method in compare_trials.SWEEPS:
    runs = [
      r
      for r in results
      if r['trial']['method'] == method and r['trial']['seed'] == 0
    ]
    runs.sort(key=lambda r: r['trial']['rate'])
    cells = ', '.join(f'{r["trial"]["rate"]:g}: {_loss(r):.4f}' for r in runs)
    print(f'| {method} | {cells} |')


def _seeds(best: dict[str, list[dict[str, Any]]]) -> None:
  print(
    '\n| method | rate | mean | lowest..highest (seeds) | to AdamW, same seed |'
    ' largest angle | spectrum drift |\n| --- | --- | --- | --- | --- | --- |'
    ' --- |'
  )
  adamw = {r['trial']['seed']: _loss(r) for r in best.get('adamw', ())}
  for method, runs in best.items():
    losses = [_loss(r) for r in runs]
    gaps = [
      _loss(r) - adamw[r['trial']['seed']]
      for r in runs
      if r['trial']['seed'] in adamw
    ]
    gap = f'{min(gaps):+.4f}..{max(gaps):+.4f}' if gaps else ''
    drift = statistics.mean(r['spectrum_drift'] for r in runs)
    angle = max(r['largest_angle'] for r in runs)
    print(
      f'| {method} | {runs[0]["trial"]["rate"]:g} |'
      f' {statistics.mean(losses):.4f} | {min(losses):.4f}..{max(losses):.4f}'
      f' ({len(losses)}) | {gap} | {angle:.2f} | {drift:.3%} |'
    )


def _ablations(
  results: list[dict[str, Any]], best: dict[str, list[dict[str, Any]]]
) -> None:
  print(
    '\n| ablation, seed 0 | loss | to the method | largest angle | drift |\n'
    '| --- | --- | --- | --- | --- |'
  )
  for result in results:
    method, _, what = result['trial']['method'].partition(', ')
    if what:
      (base,) = (r for r in best[method] if r['trial']['seed'] == 0)
      print(
        f'| {method}, {what} | {_loss(result):.4f} |'
        f' {_loss(result) - _loss(base):+.4f} |'
        f' {result["largest_angle"]:.2f} | {result["spectrum_drift"]:.3%} |'
      )


def _draw(best: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
  canvas = figure.Figure(figsize=(8, 5), layout='constrained')
  axes = canvas.subplots()
  for method, runs in best.items():
    steps = [step for step, _ in runs[0]['curve']]
    losses = list(zip(*([x for _, x in r['curve']] for r in runs), strict=True))
    label = f'{method} ({statistics.mean(map(_loss, runs)):.3f})'
    axes.plot(
      steps,
      [statistics.mean(x) for x in losses],
      color=_COLOURS[method],
      label=label,
    )
    axes.fill_between(
      steps,
      [min(x) for x in losses],
      [max(x) for x in losses],
      color=_COLOURS[method],
      alpha=0.2,
      linewidth=0,
    )
  axes.set_xlabel('steps')
  axes.set_ylabel('validation loss, nats per byte')
  axes.set_title('Best rate of each method; mean and range of the seeds')
  axes.grid(alpha=0.3)
  axes.legend(title='method (final loss)')
  canvas.savefig(path, dpi=120)


if __name__ == '__main__':
  main()
