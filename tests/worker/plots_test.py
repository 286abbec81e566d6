"""A loss curve is a picture of the right size, whatever a run has logged."""

import math
import os
import struct

from matplotlib import image
import numpy as np
import pytest

from launch.worker import plots


def _records(num_steps, **changes):
  return [
    {
      'step': step,
      'loss': 2 + 6 * math.exp(-step / 60) + 0.1 * math.sin(7.0 * step),
      'learning_rate': 1e-3 / step,
      'timings': {'step_s': 0.1},
      **({'validation_loss': 2.5} if step % 100 == 0 else {}),
      **changes,
    }
    for step in range(1, num_steps + 1)
  ]


@pytest.mark.parametrize(
  'records',
  [
    _records(0),
    _records(1),
    _records(1000),
    _records(300, loss=math.nan),
    [*_records(99), {'step': 100, 'loss': math.inf, 'learning_rate': 1e-3}],
    _records(50, loss=1e30),
    [{'step': 5}],
  ],
  ids=['none', 'one', 'many', 'nan', 'inf', 'huge', 'no loss'],
)
def test_a_picture_of_the_right_size(tmp_path, records):
  path = str(tmp_path / 'loss.png')
  plots.loss_curve(path, records, 'a $title$ with_signs')
  with open(path, 'rb') as file:
    header = file.read(24)
  assert header.startswith(b'\x89PNG')
  assert struct.unpack('>2I', header[16:]) == (1080, 660)
  assert os.listdir(tmp_path) == ['loss.png']


def _colour_rows(path, colour):
  """Rows of the upper panel that show a colour."""
  pixels = image.imread(path)[:480, :, :3]
  near = np.abs(pixels - np.array(colour) / 255).max(-1) < 0.02
  return np.flatnonzero(near.any(1))


def test_validation_appears_where_there_is_some(tmp_path):
  orange = (221, 107, 32)
  with_it, without = str(tmp_path / 'a.png'), str(tmp_path / 'b.png')
  plots.loss_curve(with_it, _records(300), 'a')
  plots.loss_curve(without, _records(99), 'b')
  assert len(_colour_rows(with_it, orange))
  assert not len(_colour_rows(without, orange))


def test_one_spike_does_not_flatten_the_curve(tmp_path):
  path = str(tmp_path / 'loss.png')
  records = _records(1000)
  records[800]['loss'] = 1e6
  plots.loss_curve(path, records, 'spike')
  rows = _colour_rows(path, (43, 108, 176))
  # Below the legend, which shows the same colour at the top.
  assert np.ptp(rows[rows > 100]) > 250


def test_a_failed_write_leaves_the_old_picture(tmp_path):
  path = tmp_path / 'loss.png'
  path.write_bytes(b'old')
  (tmp_path / 'loss.png.tmp').mkdir()
  with pytest.raises(IsADirectoryError):
    plots.loss_curve(str(path), _records(3), 'a')
  assert path.read_bytes() == b'old'
