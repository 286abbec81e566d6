"""The published recipes: POET for a model's matrices, AdamW for the rest.

`poet_fs` and `poet_bs` train as in Qiu et al., `arXiv 2506.08001
<https://arxiv.org/abs/2506.08001>`_ (v4, appendix E, tables 8 to 10), `poet_x`
as the 3B run of `arXiv 2603.05500 <https://arxiv.org/abs/2603.05500>`_.

What must differ from the publications: their clip norm is joint over POET's
coordinates and all other parameters. `optax.partition` shows each group its own
gradients only, so here the same threshold holds for each group by itself. With
Adam, which undoes a common factor, that changes the relative weight of steps.
They train in pure bfloat16; here the coordinates, their moments and W0 are
float32. Their weights start `normalized`: each neuron (column of a flax kernel)
divided by its norm, which a recipe cannot do for you.
"""

import dataclasses
from typing import Any

import jax
import optax

from jaxllm.poet.inner import clip_by_ramped_norm
from jaxllm.poet.transform import poet

# What `labels` may say of a leaf.
LABELS = ('poet', 'decay', 'plain')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Hyperparameters of one run.

  Attributes:
    steps: optimizer steps; the cosine schedules end there.
    learning_rate: peak of AdamW, for everything but the rotated matrices.
    poet_learning_rate: peak of Adam over the skew coordinates.
    block_size: b of POET-BS, or None.
    fraction: b of POET-FS, or None.
    merge_every: T_m, steps between merges.
    warmup_steps: linear from 0.
    final_fraction: of the peaks, at the last step.
    weight_decay: of the leaves labelled 'decay'.
    clip_norm: of each group's gradient.
    clip_ramp_steps: after each merge, for POET's clip norm.
    beta1: of every Adam.
    beta2: of every Adam.
    epsilon: of every Adam.
    neumann_terms: k.
  """

  steps: int
  learning_rate: float
  poet_learning_rate: float
  block_size: int | None = None
  fraction: float | None = None
  merge_every: int = 400
  warmup_steps: int = 0
  final_fraction: float = 0.01
  weight_decay: float = 0.01
  clip_norm: float = 0.1
  clip_ramp_steps: int = 10
  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-6
  neumann_terms: int = 3


# Model size -> (steps, AdamW's rate).
_SIZES = {
  '60m': (300_000, 1e-2),
  '130m': (400_000, 5e-3),
  '350m': (400_000, 5e-3),
  '1.3b': (500_000, 1e-3),
}
# Rate x block size is constant.
_FS_RATES = {1 / 2: 1e-3, 1 / 4: 2e-3, 1 / 8: 4e-3}
_BS_RATES = {256: 1e-3, 128: 2e-3, 64: 4e-3}

POET_FS = {
  (size, fraction): Recipe(steps, rate, poet_rate, fraction=fraction)
  for size, (steps, rate) in _SIZES.items()
  for fraction, poet_rate in _FS_RATES.items()
}
POET_BS = {
  (size, block): Recipe(steps, rate, poet_rate, block_size=block)
  for size, (steps, rate) in _SIZES.items()
  for block, poet_rate in _BS_RATES.items()
}
# The published rate of the coordinates is 5e-4 times a `poet_scale` of 0.5.
POET_X = {
  ('3b', 256): Recipe(
    600_000,
    1e-3,
    0.5 * 5e-4,
    block_size=256,
    warmup_steps=5000,
    clip_norm=1.0,
  )
}


def poet_fs(
  size: str,
  fraction: float,
  labels: Any,
  *,
  dimension_numbers: Any = None,
  seed: int = 0,
  **overrides: Any,
) -> optax.GradientTransformationExtraArgs:
  """POET-FS with AdamW for the rest, as published for a model size.

  Args:
    size: '60m', '130m', '350m' or '1.3b'.
    fraction: 1/2, 1/4 or 1/8 of rows and columns that turn at a time.
    labels: a tree like the params, or a function from params to one: 'poet'
      for the matrices to rotate (of the decoder's layers; no embedding, head,
      norm or bias), 'decay' for other matrices, 'plain' for what weight decay
      must leave alone.
    dimension_numbers: of the 'poet' leaves, see `poet`.
    seed: of the permutations.
    **overrides: fields of `Recipe` to replace, such as `steps=10_000`.

  Raises:
    ValueError: nothing was published for these arguments.
  """
  recipe = _look_up(POET_FS, 'POET-FS', size, fraction, overrides)
  return from_recipe(recipe, labels, dimension_numbers, seed)


def poet_bs(
  size: str,
  block_size: int,
  labels: Any,
  *,
  dimension_numbers: Any = None,
  seed: int = 0,
  **overrides: Any,
) -> optax.GradientTransformationExtraArgs:
  """POET-BS with AdamW for the rest, as published for a model size.

  Args:
    size: '60m', '130m', '350m' or '1.3b'.
    block_size: 256, 128 or 64.
    labels: see `poet_fs`.
    dimension_numbers: of the 'poet' leaves, see `poet`.
    seed: of the permutations.
    **overrides: fields of `Recipe` to replace, such as `steps=10_000`.

  Raises:
    ValueError: nothing was published for these arguments.
  """
  recipe = _look_up(POET_BS, 'POET-BS', size, block_size, overrides)
  return from_recipe(recipe, labels, dimension_numbers, seed)


def poet_x(
  size: str,
  block_size: int,
  labels: Any,
  *,
  dimension_numbers: Any = None,
  seed: int = 0,
  **overrides: Any,
) -> optax.GradientTransformationExtraArgs:
  """POET-X with AdamW for the rest, as its 3B run was trained.

  POET-X computes POET-BS in another order, with the same updates; this alias
  is its hyperparameters. The published clip ramp ends with step 2,000; here it
  follows every merge, as in POET.

  Args:
    size: '3b'.
    block_size: 256.
    labels: see `poet_fs`.
    dimension_numbers: of the 'poet' leaves, see `poet`.
    seed: of the permutations.
    **overrides: fields of `Recipe` to replace, such as `steps=10_000`.

  Raises:
    ValueError: nothing was published for these arguments.
  """
  recipe = _look_up(POET_X, 'POET-X', size, block_size, overrides)
  return from_recipe(recipe, labels, dimension_numbers, seed)


def from_recipe(
  recipe: Recipe, labels: Any, dimension_numbers: Any, seed: int
) -> optax.GradientTransformationExtraArgs:
  """The transform of a recipe; arguments as in `poet_fs`."""
  adam = {
    'b1': recipe.beta1,
    'b2': recipe.beta2,
    'eps': recipe.epsilon,
  }
  rest = optax.adamw(
    _schedule(recipe, recipe.learning_rate),
    **adam,
    weight_decay=recipe.weight_decay,
    mask=lambda params: jax.tree.map(
      lambda label: label == 'decay', _labels(labels, params)
    ),
  )
  rotated = poet(
    optax.chain(
      clip_by_ramped_norm(recipe.clip_norm, ramp_steps=recipe.clip_ramp_steps),
      optax.adam(_schedule(recipe, recipe.poet_learning_rate), **adam),
    ),
    block_size=recipe.block_size,
    fraction=recipe.fraction,
    neumann_terms=recipe.neumann_terms,
    merge_every=recipe.merge_every,
    dimension_numbers=dimension_numbers,
    seed=seed,
  )
  return optax.partition(
    {
      'poet': rotated,
      'rest': optax.chain(optax.clip_by_global_norm(recipe.clip_norm), rest),
    },
    lambda params: jax.tree.map(
      lambda label: 'poet' if label == 'poet' else 'rest',
      _labels(labels, params),
    ),
  )


def _schedule(recipe: Recipe, peak: float) -> optax.Schedule:
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if recipe.warmup_steps else peak,
    peak_value=peak,
    warmup_steps=recipe.warmup_steps,
    decay_steps=recipe.steps,
    end_value=peak * recipe.final_fraction,
  )


def _labels(labels: Any, params: Any) -> Any:
  """The tree of labels, each one known."""
  found = labels(params) if callable(labels) else labels
  for label in jax.tree.leaves(found):
    if label not in LABELS:
      raise ValueError(
        f'label {label!r} is unknown: use one of {", ".join(LABELS)}'
      )
  return found


def _look_up(
  table: dict[tuple[str, float], Recipe],
  name: str,
  size: str,
  block: float,
  overrides: dict[str, Any],
) -> Recipe:
  if (size, block) not in table:
    known = ', '.join(f'{size} {block:g}' for size, block in table)
    raise ValueError(
      f'{name} was not published for {size} {block:g}, only for {known}: take'
      ' the nearest of these and override what differs'
    )
  return dataclasses.replace(table[size, block], **overrides)
