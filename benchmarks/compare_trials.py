"""Which runs the comparison of optimizers makes: methods, rates, ablations.

All start from the same kind of weights (normalised Gaussian) and train every
leaf but the decoder's matrices with AdamW; methods differ in what they do with
the matrices. That AdamW's rate is the one that AdamW itself does best with.
"""

import dataclasses
import json
import pathlib

from jaxllm.model import decoder
from jaxllm.train import optimizers

STEPS = 1000
MERGE_EVERY = 100
_REST_RATE = 1e-3  # AdamW's best, see SWEEPS
_MODEL = decoder.DecoderConfig(
  vocab_size=256,  # bytes
  hidden_size=192,
  intermediate_size=576,
  num_layers=2,
  num_heads=3,
  num_kv_heads=3,
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
  compute_dtype='float32',
  remat='none',
  attention='xla',
)
_ADAMW = optimizers.AdamWConfig(
  learning_rate=_REST_RATE,
  beta1=0.9,
  beta2=0.95,
  epsilon=1e-8,
  weight_decay=0.01,
  clip_norm=1.0,
)
_POET = optimizers.PoetConfig(
  inner='adam',
  learning_rate=4e-3,
  beta1=0.9,
  beta2=0.999,
  epsilon=1e-6,
  alternate_sides=False,
  clip_norm=0.1,
  clip_ramp_steps=10,
  block_size=64,
  fraction=0.0,
  neumann_terms=3,
  merge_every=MERGE_EVERY,
  resample_every=1,
  reset_inner=True,
  partitions=1,
  seed=0,
)
_BASE = optimizers.OptimizerConfig(
  name='adamw',
  warmup_steps=100,
  final_fraction=0.01,
  adamw=_ADAMW,
  muon=optimizers.MuonConfig(learning_rate=1e-2, beta=0.95, weight_decay=0.01),
  poet=_POET,
)


@dataclasses.dataclass(frozen=True)
class Trial:
  """One run.

  Attributes:
    name: of its file.
    method: the group that the report puts it in.
    rate: the learning rate that a sweep varies.
    seed: of weights, rows and permutations.
    steps: optimizer steps.
    model: the decoder.
    optimizer: with the rate filled in.
  """

  name: str
  method: str
  rate: float
  seed: int
  steps: int
  model: decoder.DecoderConfig
  optimizer: optimizers.OptimizerConfig

  def path(self, directory: pathlib.Path) -> pathlib.Path:
    """The trial's result."""
    return directory / f'{self.name}.json'


STAGES = ('sweep', 'seeds', 'ablations')
# Learning rates, or radians per step, a factor of two apart.
SWEEPS = {
  'adamw': (5e-4, 1e-3, 2e-3, 4e-3),
  'muon': (1.25e-3, 2.5e-3, 5e-3, 1e-2),
  'poet_bs': (1e-3, 2e-3, 4e-3, 8e-3),
  'poet_fs': (1e-3, 2e-3, 4e-3, 8e-3),
  'poet_orthogonalized': (0.005, 0.01, 0.02, 0.04),
}
_SEEDS = (1, 2)
_replace = dataclasses.replace


def trials(stage: str, directory: pathlib.Path) -> list[Trial]:
  """The trials of a stage; all but the sweep need the sweep's results."""
  if stage == 'sweep':
    return [
      _trial(method, rate) for method, rates in SWEEPS.items() for rate in rates
    ]
  best = {method: best_rate(method, directory) for method in SWEEPS}
  if stage == 'seeds':
    return [
      _trial(method, rate, seed=seed)
      for seed in _SEEDS
      for method, rate in best.items()
    ]
  return _ablations(best)


def best_rate(method: str, directory: pathlib.Path) -> float:
  """The rate of the sweep with the lowest validation loss."""
  losses = {
    rate: json.loads(_trial(method, rate).path(directory).read_text())[
      'validation_loss'
    ]
    for rate in SWEEPS[method]
  }
  return min(losses, key=losses.get)


def _ablations(best: dict[str, float]) -> list[Trial]:
  """One setting at a time, at the method's best rate."""
  found = []

  def add(method: str, what: str, *, model=None, rest=None, **poet) -> None:
    trial = _trial(method, best[method])
    optimizer = _replace(
      trial.optimizer, poet=_replace(trial.optimizer.poet, **poet)
    )
    if rest:
      adamw = _replace(optimizer.adamw, learning_rate=rest)
      optimizer = _replace(optimizer, adamw=adamw)
    found.append(
      _replace(
        trial,
        name=f'{trial.name}-{what}',
        method=f'{method}, {what}',
        model=_replace(trial.model, **(model or {})),
        optimizer=optimizer,
      )
    )

  inits = (('standard', 0.02), ('xavier', 1.0), ('uniform_spectrum', 1.0))
  for name, scale in inits:
    model = {'initializer': name, 'init_scale': scale}
    add('poet_bs', f'init={name}', model=model)
  for merge_every in (25, 400):
    ramp = min(10, merge_every - 1)
    add(
      'poet_bs',
      f'T={merge_every}',
      merge_every=merge_every,
      clip_ramp_steps=ramp,
    )
  for terms in (1, 2):
    add('poet_bs', f'k={terms}', neumann_terms=terms)
  for method in ('poet_orthogonalized', 'muon', 'poet_bs'):
    add(method, 'rest=0.004', rest=4e-3)
  add('poet_orthogonalized', 'both_sides', alternate_sides=False)
  add('poet_orthogonalized', 'b=96', block_size=96)
  for scale in (0.5, 2.0):
    model = {'init_scale': scale}
    add('poet_orthogonalized', f'scale={scale:g}', model=model)
  standard = {'initializer': 'standard', 'init_scale': 0.02}
  add('adamw', 'init=standard', model=standard)
  return found


def _trial(method: str, rate: float, seed: int = 0) -> Trial:
  name = 'poet' if method.startswith('poet') else method
  optimizer = _replace(_BASE, name=name)
  if method == 'adamw':
    optimizer = _replace(optimizer, adamw=_replace(_ADAMW, learning_rate=rate))
  elif method == 'muon':
    optimizer = _replace(
      optimizer, muon=_replace(optimizer.muon, learning_rate=rate)
    )
  else:
    changes = {
      'poet_bs': {},
      'poet_fs': {'block_size': 0, 'fraction': 0.5},
      'poet_orthogonalized': {
        'inner': 'orthogonalized',
        'beta1': 0.95,
        'alternate_sides': True,
        'clip_norm': 1.0,
        'clip_ramp_steps': 0,
        'merge_every': 1,
        'resample_every': MERGE_EVERY,
      },
    }[method]
    poet = _replace(_POET, learning_rate=rate, seed=seed, **changes)
    optimizer = _replace(optimizer, poet=poet)
  return Trial(
    f'{method}-{rate:g}-seed{seed}',
    method,
    rate,
    seed,
    STEPS,
    _MODEL,
    optimizer,
  )
