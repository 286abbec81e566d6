"""AdamW, Muon and POET for a decoder, chosen per path by a strict table.

Decoder matrices go to the named optimizer; embedding, head, norms and biases
to AdamW whichever it is. Weight decay applies to matrices and embeddings, never
to norms, biases or POET's matrices, whose spectrum is fixed.

Gradient clipping is joint over all parameters for `adamw` and `muon`. Under
`poet` the two groups are clipped apart: POET's norm is that of the skew
coordinates' gradient, which only exists inside the transform. (The published
code clips over both together.)
"""

from collections.abc import Callable
import dataclasses
import math
import re
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
import optax

from jaxllm import poet as poet_lib

# (pattern of the whole path, group): the first match wins, none is an error.
PARAMETER_GROUPS = (
  (r'layers/(attention|mlp)/\w+_proj/kernel', 'matrix'),
  (r'(embed/embedding|lm_head/kernel)', 'embedding'),
  (r'(layers/\w+_norm|final_norm)/scale', 'vector'),
  (r'layers/(attention|mlp)/\w+_proj/bias', 'vector'),
)
NAMES = ('adamw', 'muon', 'poet')
POET_INNER = ('adam', 'orthogonalized')


@dataclasses.dataclass(frozen=True)
class AdamWConfig:
  """AdamW; also of everything but the matrices under `muon` and `poet`.

  Attributes:
    learning_rate: peak.
    beta1: decay of the first moment.
    beta2: decay of the second moment.
    epsilon: added to the root of the second moment.
    weight_decay: decoupled, times the learning rate.
    clip_norm: global gradient norm above which gradients are scaled down.
  """

  learning_rate: float
  beta1: float
  beta2: float
  epsilon: float
  weight_decay: float
  clip_norm: float

  def __post_init__(self):
    _check('optimizer.adamw', self)


@dataclasses.dataclass(frozen=True)
class MuonConfig:
  """Muon on the decoder's matrices.

  Attributes:
    learning_rate: peak; updates have RMS 0.2 before it, as AdamW's have.
    beta: momentum, Nesterov.
    weight_decay: decoupled, times the learning rate.
  """

  learning_rate: float
  beta: float
  weight_decay: float

  def __post_init__(self):
    _check('optimizer.muon', self)


@dataclasses.dataclass(frozen=True)
class PoetConfig:
  """POET on the decoder's matrices; the inner optimizer is chosen by name.

  Attributes:
    inner: 'adam', as published; 'orthogonalized': Nesterov momentum whose
      direction turns every plane of a block by the same angle.
    learning_rate: peak. Of 'adam', per skew coordinate, and learning_rate x
      block_size is about constant; of 'orthogonalized', radians per step.
    beta1: decay of the first moment, or of the momentum.
    beta2: Adam's decay of the second moment.
    epsilon: added to the root of Adam's second moment.
    alternate_sides: whether steps turn rows and columns in turn.
    clip_norm: norm of the skew coordinates' gradient.
    clip_ramp_steps: steps after a merge in which the clip norm rises from a
      tenth to all of `clip_norm`; 0 has no ramp.
    block_size: POET-BS: b, divides every width of the decoder's matrices; 0 for
      POET-FS.
    fraction: POET-FS: the share of rows and columns that turns; 0 for POET-BS.
    neumann_terms: k of the Cayley-Neumann series.
    merge_every: steps between merges.
    resample_every: merges between new permutations.
    reset_inner: whether new permutations zero the inner optimizer's moments.
    partitions: groups of each dim that permutations do not leave.
    seed: of the permutations.
  """

  inner: str
  learning_rate: float
  beta1: float
  beta2: float
  epsilon: float
  alternate_sides: bool
  clip_norm: float
  clip_ramp_steps: int
  block_size: int
  fraction: float
  neumann_terms: int
  merge_every: int
  resample_every: int
  reset_inner: bool
  partitions: int
  seed: int

  def __post_init__(self):
    _check('optimizer.poet', self)
    if self.inner not in POET_INNER:
      raise ValueError(
        f'optimizer.poet.inner={self.inner!r}: choose one of'
        f' {", ".join(POET_INNER)}'
      )
    if not 0 <= self.clip_ramp_steps < self.merge_every:
      raise ValueError(
        f'optimizer.poet.clip_ramp_steps={self.clip_ramp_steps}: the ramp'
        f' starts again at every merge (merge_every={self.merge_every}); give'
        ' fewer steps than that, or 0'
      )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Which optimizer, its schedule, and the settings of each.

  Attributes:
    name: 'adamw', 'muon' or 'poet'.
    warmup_steps: linear from 0; then cosine until the last step.
    final_fraction: of the peak learning rate at the last step.
    adamw: see `AdamWConfig`.
    muon: see `MuonConfig`.
    poet: see `PoetConfig`.
  """

  name: str
  warmup_steps: int
  final_fraction: float
  adamw: AdamWConfig
  muon: MuonConfig
  poet: PoetConfig

  def __post_init__(self):
    if self.name not in NAMES:
      raise ValueError(
        f'optimizer.name={self.name!r}: choose one of {", ".join(NAMES)}'
      )
    if self.warmup_steps < 0:
      raise ValueError(
        f'optimizer.warmup_steps={self.warmup_steps}: give 0 or more'
      )
    if not 0 <= self.final_fraction <= 1:
      raise ValueError(
        f'optimizer.final_fraction={self.final_fraction} is not in [0, 1]'
      )


class Optimizer(NamedTuple):
  """An optax transform with what a training step needs besides.

  Attributes:
    transform: init and update; takes the extra argument `as_weights`.
    schedules: learning rate by step, one per log name.
    assign: `(params, updates) -> params` for updates made with
      `as_weights=True`: adds them, but POET's are the new weights themselves,
      so that W0 and the coordinates determine the params' bits.
    readings: `opt_state -> dict` of scalars to log.
  """

  transform: optax.GradientTransformationExtraArgs
  schedules: dict[str, optax.Schedule]
  assign: Callable[[Any, Any], Any]
  readings: Callable[[Any], dict[str, Array]]


def build(config: OptimizerConfig, num_steps: int) -> Optimizer:
  """Builds the named optimizer for a run of `num_steps` optimizer steps."""

  def schedule(peak: float) -> optax.Schedule:
    if config.warmup_steps >= num_steps:
      raise ValueError(
        f'optimizer.warmup_steps={config.warmup_steps} leaves nothing of'
        f' train.steps={num_steps}: lower it'
      )
    return optax.warmup_cosine_decay_schedule(
      init_value=0.0 if config.warmup_steps else peak,
      peak_value=peak,
      warmup_steps=config.warmup_steps,
      decay_steps=num_steps,
      end_value=peak * config.final_fraction,
    )

  adamw_schedule = schedule(config.adamw.learning_rate)
  groups = _adamw_groups(config.adamw, adamw_schedule)
  clip = optax.clip_by_global_norm(config.adamw.clip_norm)
  schedules = {'learning_rate': adamw_schedule}
  if config.name == 'adamw':
    transform = optax.chain(clip, optax.partition(groups, parameter_groups))
    return Optimizer(
      transform, schedules, optax.apply_updates, lambda state: {}
    )
  if config.name == 'muon':
    schedules['learning_rate/muon'] = schedule(config.muon.learning_rate)
    groups['matrix'] = _muon(config.muon, schedules['learning_rate/muon'])
    transform = optax.chain(clip, optax.partition(groups, parameter_groups))
    return Optimizer(
      transform, schedules, optax.apply_updates, lambda state: {}
    )
  schedules['learning_rate/poet'] = schedule(config.poet.learning_rate)
  rest = optax.chain(
    clip,
    optax.partition(
      {name: groups[name] for name in ('embedding', 'vector')},
      parameter_groups,
    ),
  )
  transform = optax.partition(
    {'poet': _poet(config.poet, schedules['learning_rate/poet']), 'rest': rest},
    lambda params: jax.tree.map(
      lambda group: 'poet' if group == 'matrix' else 'rest',
      parameter_groups(params),
    ),
  )
  return Optimizer(transform, schedules, _assign_poet, _poet_readings)


def parameter_groups(params: Any) -> Any:
  """Tree of group names by `PARAMETER_GROUPS`.

  Raises:
    ValueError: a path matches no pattern.
  """

  def group(path, _) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    for pattern, value in PARAMETER_GROUPS:
      if re.fullmatch(pattern, name):
        return value
    raise ValueError(
      f'no optimizer group matches {name}: add it to PARAMETER_GROUPS'
    )

  return jax.tree_util.tree_map_with_path(group, params)


def _adamw_groups(
  config: AdamWConfig, schedule: optax.Schedule
) -> dict[str, optax.GradientTransformation]:
  def adamw(weight_decay: float) -> optax.GradientTransformation:
    return optax.adamw(
      schedule,
      b1=config.beta1,
      b2=config.beta2,
      eps=config.epsilon,
      weight_decay=weight_decay,
    )

  return {
    'matrix': adamw(config.weight_decay),
    'embedding': adamw(config.weight_decay),
    'vector': adamw(0.0),
  }


def _muon(
  config: MuonConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  def dimensions(params: Any) -> Any:
    # Layers are stacked on axis 0: without this Muon would mix them.
    return jax.tree.map(
      lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params
    )

  return optax.contrib.muon(
    schedule,
    beta=config.beta,
    nesterov=True,
    weight_decay=config.weight_decay,
    muon_weight_dimension_numbers=dimensions,
    consistent_rms=0.2,
  )


def _poet(
  config: PoetConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  return poet_lib.poet(
    _poet_inner(config, schedule),
    block_size=config.block_size or None,
    fraction=config.fraction or None,
    neumann_terms=config.neumann_terms,
    merge_every=config.merge_every,
    resample_every=config.resample_every,
    reset_inner=config.reset_inner,
    partitions=config.partitions,
    seed=config.seed,
  )


def _poet_inner(
  config: PoetConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  if config.clip_ramp_steps:
    clip = poet_lib.clip_by_ramped_norm(
      config.clip_norm, ramp_steps=config.clip_ramp_steps
    )
  else:
    clip = optax.clip_by_global_norm(config.clip_norm)
  if config.inner == 'adam':
    direction = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    size = optax.scale_by_learning_rate(schedule)
  else:
    direction = optax.chain(
      optax.trace(config.beta1, nesterov=True), poet_lib.orthogonalize()
    )
    size = poet_lib.scale_by_angle(schedule)
  sides = (poet_lib.alternate_sides(),) if config.alternate_sides else ()
  return optax.chain(clip, direction, *sides, size)


def _assign_poet(params: Any, updates: Any) -> Any:
  return jax.tree.map(
    lambda group, param, update: (
      update if group == 'matrix' else optax.apply_updates(param, update)
    ),
    parameter_groups(params),
    params,
    updates,
  )


def _poet_readings(opt_state: Any) -> dict[str, Array]:
  readings = opt_state.inner_states['poet'].inner_state.readings
  return {f'poet/{name}': value for name, value in readings._asdict().items()}


def _check(where: str, config: Any) -> None:
  """Refuses numbers that no optimizer can mean, by the settings' names."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.name.startswith('beta'):
      ok, wanted = 0 <= value < 1, 'in [0, 1)'
    elif field.name == 'weight_decay':
      ok, wanted = 0 <= value < math.inf, '0 or more'
    elif field.name in ('learning_rate', 'clip_norm', 'epsilon'):
      ok, wanted = 0 < value < math.inf, 'above 0'
    else:  # POET's own, which `poet` checks
      continue
    if not ok:
      raise ValueError(f'{where}.{field.name}={value}: give a number {wanted}')
