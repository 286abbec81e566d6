r"""Trains one small model with many optimizers, for equal tokens.

  python -m benchmarks.compare_optimizers --data=FILE.jsonl.gz --output=DIR \
      --stage=sweep

FILE holds `{"text": ...}` per line; every tenth document is held out. Stages:
`sweep` tries as many learning rates for each method, `seeds` repeats the best
of each with two more seeds, `ablations` varies one setting of POET at a time.
Each trial is one JSON file in DIR; trials that are there are not repeated, so a
stopped command goes on when given again. `--part=0/2` and `--part=1/2` share a
stage between two processes. `benchmarks.compare_report` draws what DIR holds.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import gzip
import json
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from benchmarks import compare_trials
from jaxllm import batch as batch_lib
from jaxllm.model import decoder
from jaxllm.poet import spectrum
from jaxllm.train import objectives
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib

_LENGTH = 128  # bytes per row
_ROWS = 4  # rows per step
_EVALUATE_EVERY = 100  # steps
_EVALUATION_ROWS = 128  # along the way
_FINAL_ROWS = 512


def main() -> None:
  """Runs the trials of a stage that are not done yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', required=True, type=pathlib.Path)
  parser.add_argument('--output', required=True, type=pathlib.Path)
  parser.add_argument('--stage', required=True, choices=compare_trials.STAGES)
  parser.add_argument('--part', default='0/1', help='i/n: every n-th trial')
  flags = parser.parse_args()
  index, parts = map(int, flags.part.split('/'))

  flags.output.mkdir(parents=True, exist_ok=True)
  trials = compare_trials.trials(flags.stage, flags.output)[index::parts]
  todo = [t for t in trials if not t.path(flags.output).exists()]
  print(f'{flags.stage}: {len(trials)} trials, {len(todo)} to run')
  train, validation = _read(flags.data)
  for trial in todo:
    result = _run(trial, train, validation)
    path = trial.path(flags.output)
    temporary = path.with_suffix('.partial')
    temporary.write_text(json.dumps(result) + '\n')
    os.replace(temporary, path)
    print(
      f'{trial.name}: validation {result["validation_loss"]:.4f} nats per byte'
      f' in {result["seconds"]:.0f} s',
      flush=True,
    )


def _read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Bytes to train on, and rows `[_FINAL_ROWS, _LENGTH + 1]` held out."""
  opened = gzip.open if path.suffix == '.gz' else open
  parts = ([], [])
  with opened(path, 'rt', encoding='utf-8') as lines:
    for i, line in enumerate(lines):
      parts[i % 10 == 9].append(json.loads(line)['text'].encode())
  train, held_out = (
    np.frombuffer(b'\n'.join(part), np.uint8) for part in parts
  )
  starts = np.linspace(
    0, len(held_out) - _LENGTH - 1, _FINAL_ROWS, dtype=np.int64
  )
  return train, _rows(held_out, starts)


def _rows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
  return text[starts[:, None] + np.arange(_LENGTH + 1)]


def _batch(rows: np.ndarray) -> batch_lib.Batch:
  return batch_lib.shift(rows.astype(np.int32), np.ones(rows.shape, np.int32))


def _batches(text: np.ndarray, seed: int, steps: int) -> Iterator[Any]:
  """Random rows; the same ones for every method with this seed."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    yield _batch(_rows(text, rng.integers(0, len(text) - _LENGTH - 1, _ROWS)))


def _run(
  trial: compare_trials.Trial, text: np.ndarray, validation: np.ndarray
) -> dict[str, Any]:
  """Trains and returns what the report needs, as plain values."""
  model = decoder.Decoder(trial.model)
  optimizer = optimizers.build(trial.optimizer, trial.steps)

  def loss(params, batch, key=None):
    del key
    return objectives.next_token_loss(model, params, batch, _ROWS * _LENGTH)

  @jax.jit
  def initial():
    row = jnp.zeros((1, 8), jnp.int32)
    params = model.init(jax.random.key(trial.seed), row, row, row)['params']
    return step_lib.init_state(params, optimizer, trial.seed)

  step = jax.jit(
    functools.partial(
      step_lib.train_step,
      loss_function=loss,
      optimizer=optimizer,
      microbatches=1,
    ),
    donate_argnums=0,
  )
  evaluate_rows = jax.jit(loss)

  def evaluate(params, rows) -> float:
    parts = np.split(rows, len(rows) // _ROWS)
    losses = [evaluate_rows(params, _batch(part)) for part in parts]
    return float(sum(x.sum for x in losses) / sum(x.weight for x in losses))

  sample = validation[:: _FINAL_ROWS // _EVALUATION_ROWS]
  state = initial()
  start = _spectra(state.params)
  began = time.monotonic()
  losses, angles, curve = [], [], []
  batches = _batches(text, trial.seed, trial.steps)
  for i, batch in enumerate(
    tqdm.tqdm(batches, trial.name, trial.steps, mininterval=5), start=1
  ):
    state, metrics = step(state, batch)
    losses.append(metrics['loss'])
    angles.append(metrics.get('poet/largest_angle', jnp.zeros([])))
    if i % _EVALUATE_EVERY == 0 or i == trial.steps:
      curve.append((i, evaluate(state.params, sample)))
      if not np.isfinite(curve[-1][1]):
        break
  end = _spectra(state.params)
  return dict(
    trial=dataclasses.asdict(trial),
    validation_loss=evaluate(state.params, validation),
    curve=curve,
    losses=[round(float(x), 4) for x in losses],
    largest_angle=float(np.max(angles)),
    parameters=decoder.count_parameters(state.params),
    spectrum_drift=_drift(start, end),
    seconds=time.monotonic() - began,
    jax=jax.__version__,
  )


def _spectra(params: Any) -> list[np.ndarray]:
  kernels = jax.tree.leaves(params['layers'])
  return [
    np.asarray(spectrum.singular_values(kernel))
    for kernel in kernels
    if kernel.ndim == 3
  ]


def _drift(start: list[np.ndarray], end: list[np.ndarray]) -> float:
  """Mean over matrices of |sigma_end - sigma_start| / |sigma_start|."""
  return float(
    np.mean(
      [
        np.linalg.norm(b - a, axis=-1) / np.linalg.norm(a, axis=-1)
        for a, b in zip(start, end, strict=True)
      ]
    )
  )


if __name__ == '__main__':
  main()
