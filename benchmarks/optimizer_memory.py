"""Bytes that training keeps under AdamW, GaLore, Muon and POET; runs no step.

  python -m benchmarks.optimizer_memory

First one m x n matrix with everything that lasts from step to step (the weight
and the optimizer's state), counted from `jax.eval_shape` and from what the
compiler says that the update takes in, beside the formulas of table 1 of arXiv
2506.08001. Then `configs/poet_1b.py`: the state of a whole training step.
"""

import argparse
from collections.abc import Callable
import importlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxllm import poet
from launch.control import run_config
from launch.worker import program as program_lib
from launch.worker import run_settings


class Case(NamedTuple):
  """An optimizer and the floats it should keep for an m x n matrix.

  Attributes:
    transform: makes it.
    formula: (m, n) -> number of float32 values, the weight included.
    source: where the formula comes from.
  """

  transform: Callable[[], optax.GradientTransformation]
  formula: Callable[[int, int], float]
  source: str


def main() -> None:
  """Prints both tables."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--m', type=int, default=2048, help='rows, fan-in')
  parser.add_argument('--n', type=int, default=5376, help='columns, fan-out')
  parser.add_argument('--block_size', type=int, default=256)
  parser.add_argument('--rank', type=int, default=512, help="GaLore's")
  parser.add_argument('--config', default='poet_1b', help='of configs/')
  flags = parser.parse_args()
  _one_matrix(flags)
  _whole_model(flags)


def _cases(block_size: int, rank: int) -> dict[str, Case]:
  def adam() -> optax.GradientTransformation:
    return optax.adam(1e-3)

  def coordinates(m: int, n: int) -> float:
    return (m + n) * (block_size - 1) / 2

  def half(m: int, n: int) -> float:
    return sum((d // 2) * (d // 2 - 1) / 2 for d in (m, n))

  def galore(m: int, n: int) -> float:
    return m * n + max(m, n) * rank + 2 * rank * min(m, n)

  return {
    'AdamW': Case(lambda: optax.adamw(1e-3), lambda m, n: 3 * m * n, 'table 1'),
    'GaLore (optax)': Case(
      lambda: optax.contrib.galore(1e-3, rank=rank),
      galore,
      'table 1, longer side projected',
    ),
    'Muon (optax)': Case(
      lambda: optax.contrib.muon(1e-3), lambda m, n: 2 * m * n, '2 mn'
    ),
    'POET-BS': Case(
      lambda: poet.poet(adam(), block_size=block_size),
      lambda m, n: 2 * m * n + 3 * coordinates(m, n),
      'table 1, + mn',
    ),
    'POET-FS 1/2': Case(
      lambda: poet.poet(adam(), fraction=0.5),
      lambda m, n: 2 * m * n + 3 * half(m, n),
      'table 1, + mn',
    ),
    'POET-BS, merge_every=1': Case(
      lambda: poet.poet(
        adam(), block_size=block_size, merge_every=1, reset_inner=False
      ),
      lambda m, n: m * n + 2 * coordinates(m, n),
      'mn + (m + n)(b - 1)',
    ),
    '  with momentum only': Case(
      lambda: poet.poet(
        optax.chain(optax.trace(0.95), poet.scale_by_angle(0.01)),
        block_size=block_size,
        merge_every=1,
        reset_inner=False,
      ),
      lambda m, n: m * n + coordinates(m, n),
      'mn + (m + n)(b - 1) / 2',
    ),
  }


def _one_matrix(flags) -> None:
  weight = {'w': jax.ShapeDtypeStruct((flags.m, flags.n), jnp.float32)}
  print(
    f'one {flags.m} x {flags.n} matrix, float32, b = {flags.block_size}, GaLore'
    f' rank {flags.rank}; MB (of AdamW)\n'
    f'{"":24} {"eval_shape":>16} {"compiled":>9} {"formula":>9}  formula'
  )
  adamw = 0
  for name, case in _cases(flags.block_size, flags.rank).items():
    transform = case.transform()
    state = jax.eval_shape(transform.init, weight)
    kept = _bytes((weight, state))
    adamw = adamw or kept

    @jax.jit
    def step(weight, state, gradient, transform=transform):
      updates, state = transform.update(gradient, state, weight)
      return optax.apply_updates(weight, updates), state

    memory = step.lower(weight, state, weight).compile().memory_analysis()
    # A step takes the gradient, too, which does not last.
    taken = memory.argument_size_in_bytes - _bytes(weight)
    formula = 4 * case.formula(flags.m, flags.n)
    print(
      f'{name:24} {kept / 1e6:8.2f} ({kept / adamw:4.0%})'
      f' {taken / 1e6:9.2f} {formula / 1e6:9.2f}  {case.source}'
    )


def _whole_model(flags) -> None:
  module = importlib.import_module(f'configs.{flags.config}')
  print(f'\nconfigs/{flags.config}.py: state of a training step, GB (of AdamW)')
  changes = {
    'AdamW': {'name': 'adamw'},
    'Muon': {'name': 'muon'},
    'POET': {},
    'POET, merge_every=1': {
      'poet.merge_every': 1,
      'poet.reset_inner': False,
      'poet.clip_ramp_steps': 0,
    },
    '  with momentum only': {
      'poet.inner': 'orthogonalized',
      'poet.merge_every': 1,
      'poet.reset_inner': False,
      'poet.clip_ramp_steps': 0,
    },
  }
  adamw = 0
  for name, change in changes.items():
    config = module.get_config()
    for path, value in change.items():
      config.optimizer.update_from_flattened_dict({path: value})
    settings = run_settings.from_plain(run_config.to_plain(config))
    program = program_lib.build(settings, jax.devices())
    state = jax.eval_shape(program.initial_state, 0)
    kept, parameters = _bytes(state), _bytes(state.params)
    adamw = adamw or kept
    print(
      f'{name:24} {kept / 1e9:6.2f} ({kept / adamw:4.0%}), of which parameters'
      f' {parameters / 1e9:.2f}'
    )


def _bytes(tree) -> int:
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


if __name__ == '__main__':
  main()
