"""The loss curve of a run as a picture."""

from collections.abc import Sequence
import io
import math
import os
from typing import Any

import numpy as np

from launch.worker import durable

_BLUE, _ORANGE, _GREY, _GREEN = '#2b6cb0', '#dd6b20', '#4a5568', '#2f855a'


def loss_curve(
  path_png: str, records: Sequence[dict[str, Any]], title: str
) -> None:
  """Draws training and validation loss over the learning rate.

  Args:
    path_png: file to write, whole or not at all.
    records: `metric_log.read`'s; `loss`, `validation_loss` and up to two
      `learning_rate` or `learning_rate/...`, where present and finite.
    title: above the picture.

  Raises:
    OSError: the file cannot be written.
  """
  # Here and not above: a second of every restart.
  from matplotlib import figure

  canvas = figure.Figure(figsize=(9, 5.5), layout='constrained')
  canvas.set_facecolor('white')
  losses, rates = canvas.subplots(
    2, 1, sharex=True, gridspec_kw={'height_ratios': (4, 1)}
  )
  # No markup: a title may hold dollar signs.
  canvas.suptitle(title, fontsize=13, color='#1a202c', parse_math=False)
  _draw_losses(losses, records)
  _draw_learning_rates(rates, records)
  canvas.align_ylabels()
  png = io.BytesIO()
  canvas.savefig(png, format='png', dpi=120)
  temporary = f'{path_png}.tmp'
  with open(temporary, 'wb') as stream:
    stream.write(png.getvalue())
  durable.publish(temporary, os.path.abspath(path_png))


def _draw_losses(axes, records):
  steps, losses = _series(records, 'loss')
  reach = len(losses) // 100
  label = 'training'
  if reach:
    axes.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=0.8)
    label = f'training, mean of {2 * reach + 1} steps'
  mean = _running_mean(losses, reach)
  marker = 'o' if len(steps) == 1 else ''
  axes.plot(steps, mean, marker=marker, color=_BLUE, linewidth=1.8, label=label)
  held_out, validation = _series(records, 'validation_loss')
  if len(held_out):
    axes.plot(
      held_out, validation, 'o-', color=_ORANGE, ms=4, lw=1, label='validation'
    )
  _limit(axes, mean, validation)
  axes.set_ylabel('loss (nats per token)')
  if len(steps) or len(held_out):
    axes.legend(frameon=False, loc='upper right')
  _tidy(axes)


def _draw_learning_rates(axes, records):
  names = sorted(
    {name for record in records for name in record if _is_rate(name)}
  )
  for name, colour in zip(names, (_GREY, _GREEN), strict=False):
    steps, rates = _series(records, name)
    marker = 'o' if len(steps) == 1 else ''
    label = name.replace('_', ' ')
    axes.plot(steps, rates, marker=marker, color=colour, lw=1.4, label=label)
    if len(steps) == 1:
      axes.set_xlim(steps[0] - 1, steps[0] + 1)
  if len(names) > 1:
    axes.legend(frameon=False, loc='upper right', fontsize='small')
  axes.set_ylabel('learning rate')
  axes.set_xlabel('step')
  axes.set_ylim(bottom=0)
  axes.locator_params(axis='y', nbins=3)
  axes.yaxis.set_major_formatter(lambda rate, _: f'{rate:g}')
  axes.locator_params(axis='x', nbins=10, integer=True, steps=(1, 2, 5, 10))
  _tidy(axes)


def _is_rate(name):
  return name.split('/')[0] == 'learning_rate'


def _limit(axes, mean, validation):
  """Cuts off what lies above both the beginning and nearly all that follows.

  One late spike would otherwise flatten the whole curve.
  """
  shown = np.concatenate([mean, validation])
  if len(shown):
    low = shown.min()
    high = max(np.quantile(shown, 0.98), *mean[: len(mean) // 10 + 1], low)
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)


def _tidy(axes):
  axes.grid(color='#e2e8f0', linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color('#a0aec0')
  axes.tick_params(colors=_GREY)


def _series(records, name):
  """Steps and values `[N]` where the value is finite."""
  pairs = [
    (record['step'], record[name])
    for record in records
    if name in record and math.isfinite(record[name])
  ]
  steps, values = zip(*pairs, strict=True) if pairs else ((), ())
  return np.array(steps, float), np.array(values, float)


def _running_mean(values, reach):
  """Mean of each value and its neighbours up to `reach` away.

  `_running_mean([4, 2, 0, 7], 1)` is `[3, 2, 3, 3.5]`.
  """
  sums = np.cumsum(np.concatenate([np.zeros(1), values]))
  places = np.arange(len(values))
  starts = np.maximum(places - reach, 0)
  ends = np.minimum(places + reach + 1, len(values))
  return (sums[ends] - sums[starts]) / np.maximum(ends - starts, 1)
