"""What a run computes, before any array exists."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax

from jaxllm import batch as batch_lib
from jaxllm import sharding
from jaxllm.model import decoder
from jaxllm.train import objectives
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib
from launch.worker import run_settings


class Program(NamedTuple):
  """The functions of a run, and the mesh they run on.

  Attributes:
    model: the decoder.
    optimizer: see `optimizers.build`.
    mesh: of the devices; set it (`jax.set_mesh`) around the functions below.
    initial_state: `(seed,) -> TrainState`, to be jitted.
    train_step: `(state, batch, stop) -> (state, metrics)`, to be jitted; the
      metric `stop` is the largest of the int32 flags `stop` `[devices]`.
    evaluation_loss: `(params, batch) -> Loss`, to be jitted.
  """

  model: decoder.Decoder
  optimizer: optimizers.Optimizer
  mesh: jax.sharding.Mesh
  initial_state: Callable[[int], step_lib.TrainState]
  train_step: Callable[..., Any]
  evaluation_loss: Callable[..., objectives.Loss]

  def state_shapes(self, seed: int) -> step_lib.TrainState:
    """Shape, dtype and place of every array of the training state."""
    shapes = jax.eval_shape(self.initial_state, seed)
    return jax.tree.map(
      lambda leaf, place: leaf.update(sharding=place),
      shapes,
      sharding.state_shardings(shapes, self.mesh),
    )


def build(
  settings: run_settings.RunSettings, devices: list[jax.Device]
) -> Program:
  """Builds model, optimizer, mesh and the functions of a run."""
  model = decoder.Decoder(settings.model)
  optimizer = optimizers.build(settings.optimizer, settings.train.steps)
  length = settings.data.sequence_length

  def initial_params(seed):
    row = jax.numpy.zeros((1, min(length, 8)), jax.numpy.int32)
    return model.init(jax.random.key(seed), row, row, row)['params']

  def initial_state(seed):
    return step_lib.init_state(initial_params(seed), optimizer, seed)

  def loss_function(params, batch, key):
    del key  # no dropout
    return evaluation_loss(params, batch)

  def evaluation_loss(params, batch):
    return objectives.next_token_loss(
      model, params, batch, settings.train.loss_chunk_tokens
    )

  def train_step(state, batch, stop):
    state, metrics = step_lib.train_step(
      state,
      batch,
      loss_function=loss_function,
      optimizer=optimizer,
      microbatches=settings.train.microbatches,
    )
    # Processes are asked to stop one by one, and stop after the same step.
    return state, {**metrics, 'stop': jax.numpy.max(stop)}

  mesh = sharding.make_mesh(settings.mesh, devices)
  return Program(
    model, optimizer, mesh, initial_state, train_step, evaluation_loss
  )


def check(settings: run_settings.RunSettings) -> None:
  """Builds everything without arrays, before the data is prepared.

  Raises:
    ValueError: the model, the optimizer or the mesh refuses its settings.
  """
  program = build(settings, jax.devices())
  program.state_shapes(settings.train.seed)
  train, poet = settings.train, settings.optimizer.poet
  sharding.check_batch(
    train.batch_size // train.microbatches,
    program.mesh,
    'train.batch_size / train.microbatches',
  )
  if settings.optimizer.name == 'poet':
    sharding.check_partitions(poet.partitions, program.mesh)


def lower(
  program: Program, settings: run_settings.RunSettings
) -> jax.stages.Lowered:
  """The training step for these shapes and places, ready to be compiled.

  By shapes and places alone: a restart must find the program that the first
  attempt compiled. The state is donated.
  """
  rows = settings.train.batch_size, settings.data.sequence_length
  place = sharding.batch_sharding(program.mesh)
  integers = jax.ShapeDtypeStruct(rows, jax.numpy.int32, sharding=place)
  batch = batch_lib.Batch(
    *[integers] * 4, integers.update(dtype=jax.numpy.float32)
  )
  stop = jax.ShapeDtypeStruct(
    (program.mesh.size,),
    jax.numpy.int32,
    sharding=every_device(program.mesh),
  )
  shapes = program.state_shapes(settings.train.seed)
  step = jax.jit(
    program.train_step,
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, shapes), None),
  )
  return step.lower(shapes, batch, stop)


def every_device(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Of an array with one element per device."""
  return jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(mesh.axis_names)
  )


def layout(mesh: jax.sharding.Mesh) -> str:
  """How a run's sums are split, which decides their last bits.

  Example: '2x4x1 devices of 2 processes (cpu)'.
  """
  sizes = 'x'.join(map(str, mesh.shape.values()))
  kind = mesh.devices.flat[0].device_kind
  return f'{sizes} devices of {jax.process_count()} processes ({kind})'
