"""The loss curve of a run as a picture."""

from collections.abc import Sequence
import io
import math
import os
from typing import Any

from matplotlib import figure
from matplotlib import ticker
import numpy as np

from launch.worker import durable

_BLUE, _ORANGE, _GREY = '#2b6cb0', '#dd6b20', '#4a5568'


def loss_curve(
  path_png: str, records: Sequence[dict[str, Any]], title: str
) -> None:
  """Draws training and validation loss over the learning rate.

  Args:
    path_png: file to write, whole or not at all.
    records: `metric_log.read`'s; `loss`, `validation_loss` and `learning_rate`
      are drawn where they are present and finite.
    title: above the picture.

  Raises:
    OSError: the file cannot be written.
  """
  canvas = figure.Figure(figsize=(9, 5.5), layout='constrained')
  canvas.set_facecolor('white')
  losses, rates = canvas.subplots(
    2, 1, sharex=True, gridspec_kw={'height_ratios': (4, 1)}
  )
  # No markup: a title may hold dollar signs.
  canvas.suptitle(title, fontsize=13, color='#1a202c', parse_math=False)
  _draw_losses(losses, records)
  _draw_learning_rate(rates, records)
  png = io.BytesIO()
  canvas.savefig(png, format='png', dpi=120)
  temporary = f'{path_png}.tmp'
  with open(temporary, 'wb') as stream:
    stream.write(png.getvalue())
  durable.publish(temporary, os.path.abspath(path_png))


def _draw_losses(axes, records):
  steps, losses = _series(records, 'loss')
  width = max(1, len(losses) // 50)
  if width > 1:
    axes.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=0.8)
    label = f'training, mean of {width} steps'
  else:
    label = 'training'
  mean = _running_mean(losses, width)
  marker = 'o' if len(steps) == 1 else ''
  axes.plot(steps, mean, marker, ls='-', color=_BLUE, lw=1.8, label=label)
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


def _draw_learning_rate(axes, records):
  steps, rates = _series(records, 'learning_rate')
  marker = 'o' if len(steps) == 1 else ''
  axes.plot(steps, rates, marker, ls='-', color=_GREY, lw=1.4)
  axes.set_ylabel('learning rate')
  axes.set_xlabel('step')
  axes.set_ylim(bottom=0)
  axes.yaxis.set_major_locator(ticker.MaxNLocator(3))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True))
  _tidy(axes)


def _limit(axes, mean, validation):
  """Shows what was learned: a first step or a spike must not flatten it."""
  shown = np.concatenate([mean, validation])
  if len(shown) > 1 and shown.max() > shown.min():
    high = max(np.quantile(shown, 0.98), shown[: len(shown) // 10 + 1].min())
    margin = 0.08 * (high - shown.min()) or 0.5
    axes.set_ylim(shown.min() - margin, high + margin)


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


def _running_mean(values, width):
  """Mean of the last `width` values, or of all there are.

  `_running_mean([4, 2, 2, 0], 2)` is `[4, 3, 2, 1]`.
  """
  sums = np.cumsum(np.concatenate([np.zeros(1), values]))
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(ends - width, 0)
  return (sums[ends] - sums[starts]) / np.maximum(ends - starts, 1)
