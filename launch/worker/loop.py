"""The training loop: one step is dispatched before the last one is read.

Everything that may be lost and found again is an integer or lies in the
checkpoint: step n reads rows [n B, (n + 1) B) of the stream and draws from
fold_in(key, n), so a resumed run repeats the lost steps exactly.
"""

from collections.abc import Callable
from collections.abc import Iterator
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
from jaxllm.train import step as step_lib
from launch.control.protocol import EventKind
from launch.worker import agreement
from launch.worker import checkpoint
from launch.worker import outcome
from launch.worker import processes
from launch.worker import program as program_lib
from launch.worker import read_data
from launch.worker import recorder
from launch.worker import reporter as reporter_lib
from launch.worker import run_settings


class Trained(NamedTuple):
  """The end of a run: the program, its last weights, and all records."""

  program: program_lib.Program
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
  """What one attempt works with; see the modules of the fields' types.

  `timeout_s` is how long a process waits for the others at its start.
  """

  workdir: str
  settings: run_settings.RunSettings
  data: read_data.Data
  checkpoints: checkpoint.Checkpoints
  reporter: reporter_lib.Reporter
  stop: StopRequest
  timeout_s: float


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
      program = program_lib.build(settings, jax.devices())
      stack.enter_context(jax.set_mesh(program.mesh))
      state, step = _start(job, program)
      run_step = _compile(job, program, report)
      evaluate = _evaluator(settings, program, job.data)
      record = _recorder(job, program, step)
    stack.enter_context(contextlib.closing(record))
    processes.wait_for_all('compiled', job.timeout_s)
    state, step = _run_steps(
      job, program, run_step, evaluate, record, state, step
    )
    record.draw()
  if step < settings.train.steps:
    done = f'after step {step}, which is saved' if step else 'at the start'
    raise outcome.Preempted(f'stopped {done}')
  return Trained(program, state.params, record.records())


def _run_steps(
  job: Job,
  program: program_lib.Program,
  run_step: Callable[..., Any],
  evaluate: Callable[[Any], objectives.Loss],
  record: recorder.Recorder | recorder.Follower,
  state: step_lib.TrainState,
  step: int,
) -> tuple[step_lib.TrainState, int]:
  """Runs until the last step or a stop request; saves what it ends with."""
  settings, checkpoints = job.settings, job.checkpoints
  steps = settings.train.steps
  profiler = _Profiler(job.workdir, settings.profile)
  batches = _batches(job, program, step)
  place = program_lib.every_device(program.mesh)
  stop_flags = [processes.on_devices(place, flag) for flag in (0, 1)]
  job.reporter.send(
    EventKind.PHASE, name='training', total=steps, unit='steps', start=step
  )
  unread = None  # the step whose metrics nobody has read yet
  saved = step
  stopping = False
  with contextlib.closing(batches), contextlib.closing(profiler):
    while step < steps and not stopping:
      profiler.before(step)
      position, batch = next(batches)
      # After a failed write all go on to `save`, which raises on all of them.
      stop = bool(job.stop) or checkpoints.failed
      state, metrics = run_step(state, batch, stop_flags[stop])
      step += 1
      is_last = step == steps
      validation = None
      if _is_due(step, settings.evaluate.every, is_last):
        validation = evaluate(state.params)
      if unread is not None:
        stopping = record.write(*unread)
      unread = (step, metrics, validation)
      profiler.after(step, metrics)
      if _is_due(step, settings.checkpoint.every, is_last):
        # Only finite numbers are saved: read this step before saving it.
        stopping |= record.write(*unread)
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
  job.reporter.send(
    EventKind.PHASE, name='saving', total=1, unit='checkpoints', start=0
  )
  checkpoints.wait()
  _report_saved(job)
  job.reporter.send(EventKind.PROGRESS, done=1)
  return state, step


def _batches(
  job: Job, program: program_lib.Program, step: int
) -> Iterator[tuple[int, batch_lib.Batch]]:
  """Yields each batch over all processes, and the rows read with it."""
  batch_size = job.settings.train.batch_size
  place = sharding.batch_sharding(program.mesh)
  part = processes.local_rows(place, batch_size)
  stream = read_data.batches(
    job.data.train, batch_size, step * batch_size, part
  )
  with contextlib.closing(stream):
    for first, batch in stream:
      yield (
        first + batch_size,
        processes.global_batch(place, batch_size, batch),
      )


def _report_saved(job: Job) -> None:
  for step in job.checkpoints.saved():
    job.reporter.send(EventKind.CHECKPOINT_SAVED, step=step)


def _recorder(
  job: Job, program: program_lib.Program, step: int
) -> recorder.Recorder | recorder.Follower:
  """The first process writes records, the others follow them."""
  if not agreement.is_first():
    return recorder.Follower()
  settings = job.settings
  flops = decoder.flops_per_token(settings.model, settings.data.sequence_length)
  return recorder.Recorder(
    job.workdir,
    settings,
    program_lib.layout(program.mesh),
    step,
    flops,
    job.reporter,
  )


def _start(
  job: Job, program: program_lib.Program
) -> tuple[step_lib.TrainState, int]:
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
  job: Job, program: program_lib.Program, report: outcome.MemoryReport
) -> Callable[..., Any]:
  """Compiles the step ahead of time and says how large everything is."""
  settings, reporter = job.settings, job.reporter
  reporter.send(
    EventKind.PHASE, name='compiling', total=1, unit='programs', start=0
  )
  began = time.monotonic()
  compiled = program_lib.lower(program, settings).compile()
  report.analysis = compiled.memory_analysis()
  reporter.send(EventKind.PROGRESS, done=1)
  shapes = program.state_shapes(settings.train.seed)
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
  settings: run_settings.RunSettings,
  program: program_lib.Program,
  data: read_data.Data,
) -> Callable[[Any], objectives.Loss]:
  """A function from params to the summed validation loss."""
  limit, batch_size = settings.evaluate.max_batches, settings.train.batch_size
  place = sharding.batch_sharding(program.mesh)
  batches = []
  if settings.evaluate.every:
    stream = read_data.validation_batches(
      data.validation, batch_size, processes.local_rows(place, batch_size)
    )
    batches = [batch for _, batch in zip(range(limit), stream, strict=False)]
    stream.close()
  loss_of = jax.jit(program.evaluation_loss)
  add = jax.jit(lambda a, b: jax.tree.map(jax.numpy.add, a, b))

  def evaluate(params: Any) -> objectives.Loss:
    losses = [
      loss_of(params, processes.global_batch(place, batch_size, batch))
      for batch in batches
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
