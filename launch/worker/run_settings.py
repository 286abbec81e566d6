"""The whole config as frozen dataclasses, checked before anything starts."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from jaxllm import settings as settings_lib
from jaxllm import sharding
from jaxllm.model import decoder
from jaxllm.train import optimizers
from launch.worker import checkpoint
from launch.worker import read_data


@dataclasses.dataclass(frozen=True)
class TrainSettings:
  """The optimizer steps.

  Attributes:
    steps: how many.
    batch_size: rows per step.
    microbatches: parts of a batch that go through the model in turn.
    loss_chunk_tokens: tokens whose logits exist at the same time.
    seed: of the weights.
    deterministic: whether GPU kernels whose bits differ from run to run are
      left out; the launcher's `environment` sees to it.
  """

  steps: int
  batch_size: int
  microbatches: int
  loss_chunk_tokens: int
  seed: int
  deterministic: bool


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
  """Validation: every so many steps (0 = never), at most so many batches."""

  every: int
  max_batches: int


@dataclasses.dataclass(frozen=True)
class SampleSettings:
  """Continuations sampled when training ends; no prompts, no samples."""

  prompts: tuple[str, ...]
  max_new_tokens: int
  temperature: float
  top_k: int
  top_p: float


@dataclasses.dataclass(frozen=True)
class LogSettings:
  """TensorBoard files or none, and where compiled programs are kept."""

  tensorboard: bool
  compilation_cache_dir: str


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
  """Trace `steps` steps from step `start` on; 0 steps is no trace."""

  start: int
  steps: int


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """Everything that a worker reads of a config; see configs/quickstart.py."""

  init_from: str
  model: decoder.DecoderConfig
  data: read_data.DataConfig
  optimizer: optimizers.OptimizerConfig
  mesh: sharding.MeshConfig
  train: TrainSettings
  evaluate: EvaluateSettings
  sample: SampleSettings
  checkpoint: checkpoint.CheckpointConfig
  log: LogSettings
  profile: ProfileSettings


def from_plain(plain: Mapping[str, Any]) -> RunSettings:
  """Builds the settings from `<workdir>/config.json`'s content.

  Raises:
    ValueError: a key is unknown or missing, or a value cannot be used.
  """
  # `launch` is read by the control plane.
  groups = {name: group for name, group in plain.items() if name != 'launch'}
  settings = settings_lib.build(RunSettings, groups, '')
  _check(settings)
  return settings


def _check(settings: RunSettings) -> None:
  train, evaluate, profile = settings.train, settings.evaluate, settings.profile
  positive = {
    'train.steps': train.steps,
    'train.batch_size': train.batch_size,
    'train.microbatches': train.microbatches,
    'train.loss_chunk_tokens': train.loss_chunk_tokens,
    'evaluate.max_batches': evaluate.max_batches,
    'sample.max_new_tokens': settings.sample.max_new_tokens,
  }
  for name, value in positive.items():
    if value < 1:
      raise ValueError(f'{name}={value}: give 1 or more')
  not_negative = {
    'evaluate.every': evaluate.every,
    'profile.start': profile.start,
    'profile.steps': profile.steps,
    'sample.temperature': settings.sample.temperature,
    'sample.top_k': settings.sample.top_k,
  }
  for name, value in not_negative.items():
    if value < 0:
      raise ValueError(f'{name}={value}: give 0 or more')
  if train.batch_size % train.microbatches:
    raise ValueError(
      f'train.microbatches={train.microbatches} does not divide'
      f' train.batch_size={train.batch_size}: choose a divisor'
    )
  has_validation = settings.data.holdout_every or settings.data.validation
  if evaluate.every and not has_validation:
    raise ValueError(
      f'evaluate.every={evaluate.every}, but data has no validation: set'
      ' data.holdout_every or data.validation, or evaluate.every=0'
    )
  if '' in settings.sample.prompts:
    raise ValueError(
      f'sample.prompts={settings.sample.prompts} has an empty prompt: give each'
      ' at least one character, or no prompts at all'
    )
  if not 0 <= train.seed < 2**31:
    raise ValueError(f'train.seed={train.seed}: give 0 to 2**31 - 1')
  if not 0 < settings.sample.top_p <= 1:
    raise ValueError(f'sample.top_p={settings.sample.top_p} is not in (0, 1]')
