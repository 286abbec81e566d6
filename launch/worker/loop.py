"""The training loop: one step is dispatched before the last one is read.

Everything that may be lost and found again is an integer or lies in the
checkpoint: step n reads rows [n B, (n + 1) B) of the stream and draws from
fold_in(key, n), so a resumed run repeats the lost steps exactly.
"""

from collections.abc import Callable
import contextlib
import functools
import os
import signal
import time
from typing import Any
from typing import NamedTuple

import jax

from jaxllm import batch as batch_lib
from jaxllm import sharding
from jaxllm.model import decoder
from jaxllm.train import objectives
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib
from launch.control.protocol import EventKind
from launch.worker import checkpoint
from launch.worker import outcome
from launch.worker import read_data
from launch.worker import recorder
from launch.worker import reporter as reporter_lib
from launch.worker import run_settings


class Program(NamedTuple):
  """What a run computes, before any array exists.

  Attributes:
    model: the decoder.
    optimizer: see `optimizers.build`.
    mesh: of the devices; set it (`jax.set_mesh`) around the functions below.
    initial_state: `(seed,) -> TrainState`, to be jitted.
    train_step: `(state, batch) -> (state, metrics)`, to be jitted.
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


class Trained(NamedTuple):
  """The end of a run: the program, its last weights, and all records."""

  program: Program
  params: Any
  records: list[dict[str, Any]]


class StopRequest:
  """Whether to save and end: SIGTERM or SIGINT, or a launcher that is gone."""

  def __init__(self, reporter: reporter_lib.Reporter):
    self._reporter = reporter
    self._signalled = False
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._note)

  def _note(self, number: int, frame: Any) -> None:
    self._signalled = True

  def __bool__(self) -> bool:
    return self._signalled or not self._reporter.connected


class Job(NamedTuple):
  """What one attempt works with; see the modules of the fields' types."""

  workdir: str
  settings: run_settings.RunSettings
  data: read_data.Data
  checkpoints: checkpoint.Checkpoints
  reporter: reporter_lib.Reporter
  stop: StopRequest


def build_program(settings: run_settings.RunSettings) -> Program:
  """Builds model, optimizer and the functions of a run."""
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

  train_step = functools.partial(
    step_lib.train_step,
    loss_function=loss_function,
    optimizer=optimizer,
    microbatches=settings.train.microbatches,
  )
  mesh = sharding.make_mesh(settings.mesh, jax.devices())
  return Program(
    model, optimizer, mesh, initial_state, train_step, evaluation_loss
  )


def check(settings: run_settings.RunSettings) -> None:
  """Builds everything without arrays, before the data is prepared.

  Raises:
    ValueError: the model, the optimizer or the mesh refuses its settings.
  """
  program = build_program(settings)
  program.state_shapes(settings.train.seed)
  train, poet = settings.train, settings.optimizer.poet
  sharding.check_batch(
    train.batch_size // train.microbatches,
    program.mesh,
    'train.batch_size / train.microbatches',
  )
  if settings.optimizer.name == 'poet':
    sharding.check_partitions(poet.partitions, program.mesh)


def train(job: Job) -> Trained:
  """Trains from the newest good checkpoint to the last step.

  Raises:
    outcome.Preempted: a stop was requested; the state is saved.
    outcome.NotFinite: a loss or gradient was NaN or infinite.
    outcome.OutOfMemory: the step does not fit on the device.
    outcome.BadSetting: the model cannot be built, or what the workdir or
      `init_from` holds belongs to another one.
  """
  settings = job.settings
  with contextlib.ExitStack() as stack:
    report = stack.enter_context(outcome.memory_report(settings))
    with outcome.before_the_first_step():
      program = build_program(settings)
      stack.enter_context(jax.set_mesh(program.mesh))
      state, step = _start(job, program)
      run_step = _compile(job, program, report)
      evaluate = _evaluator(settings, program, job.data)
      record = recorder.Recorder(
        job.workdir, settings, step, _flops_per_token(settings), job.reporter
      )
    stack.enter_context(contextlib.closing(record))
    place = sharding.batch_sharding(program.mesh)
    state, step = _run_steps(
      job, run_step, evaluate, record, place, state, step
    )
    record.draw()
  if step < settings.train.steps:
    done = f'after step {step}, which is saved' if step else 'at the start'
    raise outcome.Preempted(f'stopped {done}')
  return Trained(program, state.params, record.records())


def _run_steps(
  job: Job,
  run_step: Callable[..., Any],
  evaluate: Callable[[Any], objectives.Loss],
  record: recorder.Recorder,
  place: jax.sharding.Sharding,
  state: step_lib.TrainState,
  step: int,
) -> tuple[step_lib.TrainState, int]:
  """Runs until the last step or a stop request; saves what it ends with."""
  settings, checkpoints = job.settings, job.checkpoints
  steps, batch_size = settings.train.steps, settings.train.batch_size
  profiler = _Profiler(job.workdir, settings.profile)
  position = step * batch_size
  batches = read_data.batches(
    job.data.train, batch_size, position, process_index=0, process_count=1
  )
  job.reporter.send(
    EventKind.PHASE, name='training', total=steps, unit='steps', start=step
  )
  unread = None  # the step whose metrics nobody has read yet
  saved = step
  with contextlib.closing(batches), contextlib.closing(profiler):
    while step < steps and not job.stop:
      profiler.before(step)
      position, batch = next(batches)
      position += batch_size
      state, metrics = run_step(state, jax.device_put(batch, place))
      step += 1
      is_last = step == steps
      validation = None
      if _is_due(step, settings.evaluate.every, is_last):
        validation = evaluate(state.params)
      if unread is not None:
        record.write(*unread)
      unread = (step, metrics, validation)
      profiler.after(step, metrics)
      if _is_due(step, settings.checkpoint.every, is_last):
        # Only finite numbers are saved: read this step before saving it.
        record.write(*unread)
        unread = None
        record.sync()
        checkpoints.save(step, state, {'position': position})
        saved = step
      _report_saved(job)
  if unread is not None:
    record.write(*unread)
  if saved < step:
    record.sync()
    checkpoints.save(step, state, {'position': position})
  checkpoints.wait()
  _report_saved(job)
  return state, step


def _report_saved(job: Job) -> None:
  for step in job.checkpoints.saved():
    job.reporter.send(EventKind.CHECKPOINT_SAVED, step=step)


def _start(job: Job, program: Program) -> tuple[step_lib.TrainState, int]:
  """State and step to begin with: checkpoint, other run's weights, or new."""
  settings, reporter = job.settings, job.reporter
  seed = settings.train.seed
  target = program.state_shapes(seed)
  places = jax.tree.map(lambda leaf: leaf.sharding, target)
  restored = job.checkpoints.restore(target)
  if restored is not None:
    expected = restored.step * settings.train.batch_size
    if restored.metadata['position'] != expected:
      raise ValueError(
        f'the checkpoint of step {restored.step} has read'
        f' {restored.metadata["position"]} rows, not {expected}: it belongs to'
        ' another batch size; use another --workdir'
      )
    reporter.send(EventKind.RESTORED, step=restored.step)
    return restored.state, restored.step
  if settings.init_from:
    params = checkpoint.restore_params(
      settings.init_from,
      target.params,
      lambda step, reason: reporter.send(
        EventKind.WARNING, text=f'{settings.init_from} step {step}: {reason}'
      ),
    )
    state = jax.jit(
      lambda params: step_lib.init_state(params, program.optimizer, seed),
      out_shardings=places,
    )(params)
    reporter.send(EventKind.MESSAGE, text=f'weights from {settings.init_from}')
    # The other run may train on: a restart must find the same beginning.
    job.checkpoints.save(0, state, {'position': 0})
    job.checkpoints.wait()
    return state, 0
  return jax.jit(program.initial_state, out_shardings=places)(seed), 0


def _compile(
  job: Job, program: Program, report: outcome.MemoryReport
) -> Callable[..., Any]:
  """Compiles the step ahead of time and says how large everything is."""
  settings, reporter = job.settings, job.reporter
  reporter.send(
    EventKind.PHASE, name='compiling', total=1, unit='programs', start=0
  )
  began = time.monotonic()
  integers = jax.ShapeDtypeStruct(
    (settings.train.batch_size, settings.data.sequence_length),
    jax.numpy.int32,
    sharding=sharding.batch_sharding(program.mesh),
  )
  batch = batch_lib.Batch(
    *[integers] * 4, integers.update(dtype=jax.numpy.float32)
  )
  # By shapes and places alone: a restart must find the program that the first
  # attempt compiled.
  shapes = program.state_shapes(settings.train.seed)
  step = jax.jit(
    program.train_step,
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, shapes), None),
  )
  compiled = step.lower(shapes, batch).compile()
  report.analysis = compiled.memory_analysis()
  reporter.send(EventKind.PROGRESS, done=1)
  leaves = jax.tree.leaves(shapes)
  state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  reporter.send(
    EventKind.MESSAGE,
    text=(
      f'{decoder.count_parameters(shapes.params) / 1e6:.2f}M parameters,'
      f' {settings.optimizer.name}, training state {state_bytes / 1e6:.1f} MB;'
      f' compiled in {time.monotonic() - began:.0f} s for {jax.device_count()}'
      f' {jax.devices()[0].device_kind}'
    ),
  )
  return compiled


def _evaluator(
  settings: run_settings.RunSettings, program: Program, data: read_data.Data
) -> Callable[[Any], objectives.Loss]:
  """A function from params to the summed validation loss."""
  limit = settings.evaluate.max_batches
  batches = []
  if settings.evaluate.every:
    stream = read_data.validation_batches(
      data.validation,
      settings.train.batch_size,
      process_index=0,
      process_count=1,
    )
    batches = [batch for _, batch in zip(range(limit), stream, strict=False)]
    stream.close()
  place = sharding.batch_sharding(program.mesh)
  loss_of = jax.jit(program.evaluation_loss)
  add = jax.jit(lambda a, b: jax.tree.map(jax.numpy.add, a, b))

  def evaluate(params: Any) -> objectives.Loss:
    losses = [
      loss_of(params, jax.device_put(batch, place)) for batch in batches
    ]
    return functools.reduce(add, losses)

  return evaluate


class _Profiler:
  """Traces a window of steps into `<workdir>/profile`."""

  def __init__(self, workdir: str, settings: run_settings.ProfileSettings):
    self._directory = os.path.join(workdir, 'profile')
    self._first = settings.start
    self._last = settings.start + settings.steps
    self._is_on = False

  def before(self, step: int) -> None:
    if step == self._first and self._last > self._first:
      jax.profiler.start_trace(self._directory)
      self._is_on = True

  def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
    if step == self._last:
      jax.block_until_ready(metrics)
      self.close()

  def close(self) -> None:
    """Ends the trace if it is still on, as when training ends inside it."""
    if self._is_on:
      jax.profiler.stop_trace()
      self._is_on = False


def _is_due(step: int, every: int, is_last: bool) -> bool:
  return every > 0 and (step % every == 0 or is_last)


def _flops_per_token(settings: run_settings.RunSettings) -> float:
  return decoder.flops_per_token(settings.model, settings.data.sequence_length)
