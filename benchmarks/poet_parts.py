"""Where one POET update spends its time, part by part.

  python -m benchmarks.poet_parts --hidden_size=512 --num_layers=8

Times the parts of `poet`'s update by themselves, in turn, on the matrices of a
Llama: gathering into the frame of the permutations, the gradient's way back to
the skew coordinates, the inner optimizers, rebuilding the weights. Parts share
work inside the real update, so they add up to more than it.
"""

import argparse
from collections.abc import Callable
import statistics
import time
from typing import Any

import jax
import optax

from jaxllm import poet
from jaxllm.poet import blocks
from jaxllm.poet import frame as frame_lib
from jaxllm.poet import state as state_lib


def main() -> None:
  """Compiles and times the parts, prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--hidden_size', type=int, default=512)
  parser.add_argument('--intermediate_size', type=int, default=1408)
  parser.add_argument('--num_layers', type=int, default=8)
  parser.add_argument('--block_size', type=int, default=64)
  parser.add_argument('--rounds', type=int, default=10)
  flags = parser.parse_args()
  print(f'jax {jax.__version__}, {jax.devices()[0].device_kind}, {vars(flags)}')
  parts = _parts(flags)
  seconds = {name: [] for name in parts}
  for round_ in range(flags.rounds + 1):
    for name, part in parts.items():
      began = time.perf_counter()
      jax.block_until_ready(part())
      if round_:  # the first compiles
        seconds[name].append(time.perf_counter() - began)
  whole = statistics.median(seconds['whole update'])
  for name, values in seconds.items():
    median = statistics.median(values)
    print(f'{name:36} {median:8.4f} s  {median / whole:6.1%}')


def _weights(flags, seed: int) -> dict[str, jax.Array]:
  """A Llama's matrices, layers stacked."""
  d, width, layers = (
    flags.hidden_size,
    flags.intermediate_size,
    flags.num_layers,
  )
  shapes = dict.fromkeys('qkvo', (layers, d, d))
  shapes['gate'] = shapes['up'] = (layers, d, width)
  shapes['down'] = (layers, width, d)
  return {
    name: jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), shape)
    for i, (name, shape) in enumerate(shapes.items())
  }


def _parts(flags) -> dict[str, Callable[[], Any]]:
  """The parts as functions of nothing, each a compiled program."""
  params, gradients = _weights(flags, 0), _weights(flags, 1)
  adam = optax.adam(1e-3, eps=1e-6)
  tx = poet.poet(adam, block_size=flags.block_size)
  state = jax.jit(tx.init)(params)
  settings = state.settings
  tree = jax.tree.structure(params)
  plans = tree.flatten_up_to(blocks.plans(settings.layout, params))
  bases = state_lib.bases(state, params)
  rotations = state_lib.rotations(state, params)
  flat = jax.tree.leaves(gradients)

  def frames():
    return frame_lib.frames(settings, state.merges, plans)

  def enter(weights):
    return [
      jax.lax.map(lambda x: x[0].enter(x[1], 1), (frame, weight))
      for frame, weight in zip(frames(), weights, strict=True)
    ]

  def pull_back(bases, rotations, flat):
    return frame_lib.pull_back(
      settings, plans, frames(), bases, rotations, flat
    )

  def rebuild(bases, rotations):
    return frame_lib.rebuild(settings, plans, frames(), bases, rotations)

  orthogonalize = poet.orthogonalize()
  nothing = optax.EmptyState()
  return {
    'whole update': _compiled(tx.update, gradients, state, params),
    'permutations drawn': _compiled(frames),
    'one gather of all weights': _compiled(enter, bases),
    'gradient back to the coordinates': _compiled(
      pull_back, bases, rotations, flat
    ),
    'adam over the coordinates': _compiled(
      adam.update, state.rotations, state.inner
    ),
    'orthogonalize the coordinates': _compiled(
      orthogonalize.update, state.rotations, nothing
    ),
    'weights rebuilt, with readings': _compiled(rebuild, bases, rotations),
    'adam over dense weights, to compare': _compiled(
      adam.update, gradients, jax.jit(adam.init)(params)
    ),
  }


def _compiled(function: Callable, *arguments: Any) -> Callable[[], Any]:
  jitted = jax.jit(function)
  return lambda: jitted(*arguments)


if __name__ == '__main__':
  main()
