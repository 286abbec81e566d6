"""Step time and memory of AdamW, Muon and POET, in turn, in one run.

  python -m benchmarks.optimizer_step --hidden_size=512 --tokens=4096

Machines are noisy, so the optimizers take turns: round r times one step of
each, and what is compared is the ratio to AdamW within a round (median, with
the 10th and 90th percentile of all rounds). Memory is the compiler's own
account of the step (arguments, results and work space), or the device's peak
where it keeps one.
"""

import argparse
import dataclasses
import functools
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import batch as batch_lib
from jaxllm.model import decoder
from jaxllm.train import objectives
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib

_ADAMW = 'adamw'
# POET's settings where they differ from the published ones.
_POET_CASES = {
  'poet': {},
  'poet, fraction=1/2': {'block_size': 0, 'fraction': 0.5},
  'poet, merge_every=1': {'merge_every': 1, 'reset_inner': False},
  'poet, orthogonalized': {
    'inner': 'orthogonalized',
    'alternate_sides': True,
    'merge_every': 1,
    'resample_every': 100,
  },
}
_CASES = (_ADAMW, 'muon', *_POET_CASES)


def main() -> None:
  """Parses the flags, runs the rounds, prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  number = functools.partial(parser.add_argument, type=int)
  number('--hidden_size', default=512, help='d')
  number('--intermediate_size', default=1408, help='FFN width')
  number('--num_layers', default=8, help='decoder layers')
  number('--vocab_size', default=4096, help='tokens of the vocabulary')
  number('--sequence_length', default=256, help='tokens per row')
  number('--tokens', default=4096, help='tokens per step')
  number('--block_size', default=64, help="POET's b")
  number('--rounds', default=10, help='timed steps of each optimizer')
  parser.add_argument('--compute_dtype', default='float32')
  flags = parser.parse_args()

  model = decoder.Decoder(_model_config(flags))
  batch = _batch(flags)
  print(
    f'jax {jax.__version__}, {jax.device_count()}'
    f' {jax.devices()[0].device_kind}'
    f' ({platform.processor() or platform.machine()}), Python'
    f' {platform.python_version()}\n{vars(flags)}'
  )
  print(f'{"optimizer state at d = 2048, b = 256, one square matrix":60}')
  for case, share in _state_shares().items():
    print(f'  {case:22} {share:6.1%} of AdamW')
  cases = {case: _compile(model, case, flags, batch) for case in _CASES}
  seconds = {case: [] for case in _CASES}
  for round_ in range(flags.rounds + 2):
    for case, (step, state, _) in cases.items():
      began = time.perf_counter()
      state, metrics = step(state, batch)
      jax.block_until_ready((state, metrics))
      elapsed = time.perf_counter() - began
      cases[case] = (step, state, cases[case][2])
      if round_ >= 2:
        seconds[case].append(elapsed)
  _print(flags, cases, seconds)


def _print(flags, cases, seconds) -> None:
  print(
    f'{"":22} {"s/step":>8} {"tokens/s":>9} {"to AdamW":>9} {"p10..p90":>12}'
    f' {"peak MB":>8} {"state MB":>8}'
  )
  for case, (_, state, peak_bytes) in cases.items():
    median = statistics.median(seconds[case])
    ratios = np.divide(seconds[case], seconds[_ADAMW])
    low, high = np.percentile(ratios, (10, 90))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    print(
      f'{case:22} {median:8.3f} {flags.tokens / median:9.0f}'
      f' {np.median(ratios):8.3f}x {low:5.2f}..{high:.2f}'
      f' {peak_bytes / 1e6:8.0f} {state_bytes / 1e6:8.0f}'
    )


def _compile(model, case, flags, batch):
  """Compiled step, first state and peak bytes of one optimizer."""
  optimizer = _optimizer(case, flags.block_size)

  def loss(params, batch, key):
    del key
    return objectives.next_token_loss(model, params, batch, flags.tokens)

  @jax.jit
  def initial():
    row = jnp.zeros((1, 8), jnp.int32)
    params = model.init(jax.random.key(0), row, row, row)['params']
    return step_lib.init_state(params, optimizer, 0)

  state = initial()
  step = jax.jit(
    functools.partial(
      step_lib.train_step,
      loss_function=loss,
      optimizer=optimizer,
      microbatches=1,
    ),
    donate_argnums=0,
  )
  compiled = step.lower(state, batch).compile()
  memory = compiled.memory_analysis()
  peak = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
    - memory.alias_size_in_bytes
  )
  return compiled, state, peak


def _optimizer(case: str, block_size: int) -> optimizers.Optimizer:
  adamw = optimizers.AdamWConfig(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)
  poet = optimizers.PoetConfig(
    inner='adam',
    learning_rate=1e-3,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-6,
    alternate_sides=False,
    clip_norm=1.0,
    clip_ramp_steps=0,
    block_size=block_size,
    fraction=0.0,
    neumann_terms=3,
    merge_every=400,
    resample_every=1,
    reset_inner=True,
    partitions=1,
    seed=0,
  )
  config = optimizers.OptimizerConfig(
    name='poet' if case in _POET_CASES else case,
    warmup_steps=0,
    final_fraction=0.1,
    adamw=adamw,
    muon=optimizers.MuonConfig(1e-3, 0.95, 0.01),
    poet=dataclasses.replace(poet, **_POET_CASES.get(case, {})),
  )
  return optimizers.build(config, num_steps=10_000)


def _state_shares() -> dict[str, float]:
  """Optimizer state of one 2048 x 2048 matrix, relative to AdamW's."""
  params = {
    'layers': {
      'mlp': {
        'up_proj': {
          'kernel': jax.ShapeDtypeStruct((1, 2048, 2048), jnp.float32)
        }
      }
    }
  }
  sizes = {}
  for case in _CASES:
    state = jax.eval_shape(_optimizer(case, 256).transform.init, params)
    sizes[case] = sum(
      leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )
  return {case: size / sizes[_ADAMW] for case, size in sizes.items()}


def _model_config(flags) -> decoder.DecoderConfig:
  heads = flags.hidden_size // 64
  return decoder.DecoderConfig(
    vocab_size=flags.vocab_size,
    hidden_size=flags.hidden_size,
    intermediate_size=flags.intermediate_size,
    num_layers=flags.num_layers,
    num_heads=heads,
    num_kv_heads=heads,
    head_dim=64,
    rope_theta=1e4,
    rope_scaling=None,
    norm_epsilon=1e-6,
    attention_bias=False,
    mlp_bias=False,
    tie_embeddings=False,
    initializer='normalized',
    init_scale=1.0,
    embedding_stddev=0.02,
    compute_dtype=flags.compute_dtype,
    remat='none',
    attention='xla',
  )


def _batch(flags) -> batch_lib.Batch:
  rows = flags.tokens // flags.sequence_length
  tokens = np.random.default_rng(0).integers(
    0, flags.vocab_size, (rows, flags.sequence_length + 1), dtype=np.int32
  )
  batch = batch_lib.shift(tokens, np.ones_like(tokens))
  return jax.tree.map(jnp.asarray, batch)


if __name__ == '__main__':
  main()
