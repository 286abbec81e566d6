"""Reads a step's metrics and puts them wherever people look."""

import os
import time
from typing import Any

import jax

from jaxllm.train import metrics as metrics_lib
from jaxllm.train import objectives
from launch.control.protocol import EventKind
from launch.worker import metric_log
from launch.worker import outcome
from launch.worker import plots
from launch.worker import reporter as reporter_lib
from launch.worker import run_settings
from launch.worker import tensorboard

# Rounding alone gives 1e-6; a flipped high bit of one weight gives far more.
_NORM_DRIFT_WARNING = 1e-3


class Follower:
  """What processes other than the first do with a step's metrics: obey them."""

  def write(
    self,
    step: int,
    metrics: dict[str, jax.Array],
    validation: objectives.Loss | None,
  ) -> bool:
    """As `Recorder.write`, without a record."""
    values, stop = _read(metrics, validation)
    _check(step, values)
    return stop

  def records(self) -> list[dict[str, Any]]:
    """None: the first process has them."""
    return []

  def sync(self) -> None:
    """There is nothing to wait for."""

  def draw(self) -> None:
    """There is nothing to draw."""

  def close(self) -> None:
    """There is nothing to close."""


class Recorder:
  """Writes metrics.jsonl, TensorBoard files, loss.png and progress events."""

  def __init__(
    self,
    workdir: str,
    settings: run_settings.RunSettings,
    layout: str,
    step: int,
    flops_per_token: float,
    reporter: reporter_lib.Reporter,
  ):
    """Continues the records of a run that has done `step` steps.

    Args:
      workdir: of the run.
      settings: of the run.
      layout: see `program.layout`.
      step: how many steps are done.
      flops_per_token: of training.
      reporter: tells the agent.
    """
    self._workdir = workdir
    self._flops_per_token = flops_per_token
    self._reporter = reporter
    self._warned = set()
    self._read_s = time.monotonic()
    self._log = metric_log.MetricLog(
      os.path.join(workdir, 'metrics.jsonl'), layout, step + 1, self._mismatch
    )
    self._board = None
    if settings.log.tensorboard:
      self._board = tensorboard.EventFile(
        os.path.join(workdir, 'tensorboard'), step + 1
      )

  def write(
    self,
    step: int,
    metrics: dict[str, jax.Array],
    validation: objectives.Loss | None,
  ) -> bool:
    """Waits for one step's metrics and records them.

    Args:
      step: number of the step, from 1.
      metrics: as `train_step` returns them.
      validation: loss of the weights after this step, where evaluated.

    Returns:
      Whether a process was asked to stop, the same for all of them.

    Raises:
      outcome.NotFinite: training must not go on from this step.
      OSError: a record was not written (a full disk, say).
    """
    values, stop = _read(metrics, validation)
    timings = self._timings(values['tokens'])
    self._log.write(step, values, timings)
    if self._board is not None:
      self._board.write(step, {**values, **timings})
    if validation is not None:
      self.draw()
    self._report(step, values, timings)
    _check(step, values)
    return stop

  def records(self) -> list[dict[str, Any]]:
    """All records of the run so far, one dict per step."""
    return metric_log.read(os.path.join(self._workdir, 'metrics.jsonl'))

  def sync(self) -> None:
    """Waits until the log is on the disk, where a checkpoint may follow it.

    Raises:
      OSError: it is not.
    """
    self._log.sync()

  def draw(self) -> None:
    """Draws the loss curve anew."""
    plots.loss_curve(
      os.path.join(self._workdir, 'loss.png'),
      self.records(),
      os.path.basename(os.path.abspath(self._workdir)),
    )

  def close(self) -> None:
    """Closes the files."""
    self._log.close()
    if self._board is not None:
      self._board.close()

  def _timings(self, tokens: float) -> dict[str, float]:
    """Seconds since the step before was read, and what follows from them."""
    now = time.monotonic()
    elapsed_s, self._read_s = now - self._read_s, now
    timings = {'step_s': elapsed_s, 'tokens_per_s': tokens / elapsed_s}
    utilization = metrics_lib.model_flops_utilization(
      timings['tokens_per_s'],
      self._flops_per_token,
      jax.devices()[0].device_kind,
      jax.device_count(),
    )
    if utilization is not None:
      timings['model_flops_utilization'] = utilization
    return timings

  def _report(
    self, step: int, values: dict[str, float], timings: dict[str, float]
  ) -> None:
    shown = {
      'loss': values['loss'],
      'tokens_per_s': round(timings['tokens_per_s']),
    }
    self._reporter.send(EventKind.PROGRESS, step=step, done=step, **shown)
    if 'validation_loss' in values:
      self._reporter.send(
        EventKind.MESSAGE,
        step=step,
        text=(
          f'step {step}: validation loss {values["validation_loss"]:.4f},'
          f' perplexity {values["validation_perplexity"]:.2f}'
        ),
      )
    angle = values.get('poet/largest_angle', 0.0)
    if angle > metrics_lib.ANGLE_WARNING:
      self._warn(
        'angle',
        f"step {step}: POET's largest angle is {angle:.2f}; from"
        f' {metrics_lib.ANGLE_WARNING} on the truncated series shrinks weights'
        ' visibly, at 1 it diverges: lower optimizer.poet.learning_rate or'
        ' merge_every',
      )
    drift = values.get('poet/norm_drift', 0.0)
    if drift > _NORM_DRIFT_WARNING:
      self._warn(
        'drift',
        f"step {step}: a weight's norm changed by {drift:.1e} between two"
        ' updates; something other than the optimizer wrote to memory',
      )

  def _warn(self, name: str, text: str) -> None:
    """Says it once per attempt."""
    if name not in self._warned:
      self._warned.add(name)
      self._reporter.send(EventKind.WARNING, text=text)

  def _mismatch(self, step: int, key: str, old: Any, new: Any) -> None:
    self._reporter.send(
      EventKind.REPLAY_MISMATCH,
      step=step,
      key=key,
      old=old,
      new=new,
      text=f'step {step} was repeated with another {key}: {old} -> {new}',
    )


def _read(
  metrics: dict[str, jax.Array], validation: objectives.Loss | None
) -> tuple[dict[str, float], bool]:
  """A step's numbers, and whether a process was asked to stop."""
  values = {k: float(v) for k, v in jax.device_get(metrics).items()}
  stop = bool(values.pop('stop'))
  values['perplexity'] = metrics_lib.perplexity(values['loss'])
  if validation is not None:
    values['validation_loss'] = float(validation.sum / validation.weight)
    values['validation_perplexity'] = metrics_lib.perplexity(
      values['validation_loss']
    )
  return values, stop


def _check(step: int, values: dict[str, float]) -> None:
  if problem := metrics_lib.problem(values):
    raise outcome.NotFinite(f'step {step}: {problem}')
