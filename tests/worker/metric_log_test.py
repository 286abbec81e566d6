"""Each step is logged once; a repeated step is compared bit by bit."""

import errno
import math
import os

import numpy as np
import pytest

from launch.worker import metric_log


@pytest.fixture
def open_(tmp_path):
  """Opens the log; `.found` collects the mismatches."""
  opened = []

  def open_log(first_step, layout='1x1x1'):
    found = []
    log = metric_log.MetricLog(
      str(tmp_path / 'metrics.jsonl'),
      layout,
      first_step,
      lambda *difference: found.append(difference),
    )
    log.found = found
    opened.append(log)
    return log

  yield open_log
  for log in opened:
    log.close()


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'metrics.jsonl'


def _loss(step):
  return float(np.float32(1) / np.float32(step + 2))


def _write(log, *steps, **changes):
  for step in steps:
    log.write(step, {'loss': _loss(step), **changes}, {'step_s': 0.5})


def test_records_come_back(open_, path):
  _write(open_(1), 1, 2, rate=np.float32(0.1))
  records = metric_log.read(str(path))
  assert records == [
    {
      'step': step,
      'loss': _loss(step),
      'rate': float(np.float32(0.1)),
      'layout': '1x1x1',
      'timings': {'step_s': 0.5},
    }
    for step in (1, 2)
  ]


@pytest.mark.parametrize(
  'value', [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2]
)
def test_every_float_comes_back_and_equals_itself(open_, path, value):
  _write(open_(1), 1, x=value)
  (record,) = metric_log.read(str(path))
  assert repr(record['x']) == repr(value)
  again = open_(1)
  _write(again, 1, x=value)
  assert again.found == []


def test_a_line_is_with_the_kernel_at_once(open_, path):
  _write(open_(1), 1)
  assert path.read_bytes().endswith(b'}\n')


def test_a_replay_writes_nothing_twice(open_, path):
  _write(open_(1), 1, 2, 3, 4)
  before = path.read_bytes()
  log = open_(3)
  log.write(3, {'loss': _loss(3)}, {'step_s': 9.0})
  assert path.read_bytes() == before
  _write(log, 4, 5)
  assert log.found == []
  assert [record['step'] for record in metric_log.read(str(path))] == [
    *range(1, 6)
  ]


def test_a_difference_is_told_and_the_old_line_stays(open_, path):
  _write(open_(1), 1, 2, more=1.0)
  before = path.read_bytes()
  log = open_(2)
  last_bit = math.nextafter(_loss(2), 1)
  log.write(2, {'loss': last_bit, 'new': 3.0}, {'step_s': 0.5})
  assert log.found == [
    (2, 'loss', _loss(2), last_bit),
    (2, 'more', 1.0, None),
    (2, 'new', None, 3.0),
  ]
  assert path.read_bytes() == before


def test_on_another_layout_losses_may_round_otherwise(open_, path):
  _write(open_(1), 1, 2, 3, rate=0.1)
  before = path.read_bytes()
  log = open_(1, '2x1x1')
  log.write(1, {'loss': _loss(1) * (1 + 1e-6), 'rate': 0.2}, {})
  assert log.found == []
  log.write(2, {'loss': _loss(2) * 1.001, 'rate': 0.1}, {})
  log.write(3, {'rate': 0.1}, {})
  assert log.found == [
    (2, 'loss', _loss(2), _loss(2) * 1.001),
    (3, 'loss', _loss(3), None),
  ]
  assert path.read_bytes() == before


def test_zeros_of_other_signs_differ(open_):
  _write(open_(1), 1, x=0.0)
  log = open_(1)
  _write(log, 1, x=-0.0)
  assert len(log.found) == 1


@pytest.mark.parametrize('cut', [1, 5, -1])
def test_a_line_cut_by_a_kill_is_written_anew(open_, path, cut):
  _write(open_(1), 1, 2, 3)
  whole = path.read_bytes()
  start = whole.rindex(b'\n', 0, -1) + 1
  path.write_bytes(whole[: start + cut if cut > 0 else cut])
  log = open_(3)
  assert path.read_bytes() == whole[:start]
  _write(log, 3)
  assert path.read_bytes() == whole


def test_a_long_partial_line_is_cut(open_, path):
  _write(open_(1), 1)
  whole = path.read_bytes()
  path.write_bytes(whole + b'\0' * 10_000)
  _write(open_(2), 2)
  assert [record['step'] for record in metric_log.read(str(path))] == [1, 2]


def test_only_a_partial_line_is_an_empty_log(open_, path):
  path.write_bytes(b'{"step": 1')
  _write(open_(1), 1)
  assert [record['step'] for record in metric_log.read(str(path))] == [1]


def test_a_reader_leaves_out_a_line_in_the_writing(open_, path):
  _write(open_(1), 1)
  with path.open('ab') as file:
    file.write(b'{"step": 2')
  assert [record['step'] for record in metric_log.read(str(path))] == [1]


@pytest.mark.parametrize(
  ('content', 'first_step', 'message'),
  [
    ('{"step": 1}\n{"step": 2}\n', 4, r'line 3 is missing: .* step 2, .* 4'),
    ('', 4, 'line 1 is missing'),
    ('{"step": 1}\n{"step": 3}\n', 4, r'line 2 is step 3 after 1'),
    ('{"step": 2}\n{"step": 1}\n', 2, r'line 2 is step 1 after 2'),
    ('{"step": 1}\n{"step": 1}\n', 2, r'line 2 is step 1 after 1'),
    ('{"step": 3}\n', 4, r'line 1 is step 3, where step 0 or 1 should be'),
    ('{"step": 1}\n{"st\n{"step": 3}\n', 4, 'line 2 is no record'),
    ('{"step": 1}\n\0\0\0\n', 2, 'line 2 is no record'),
    ('[1]\n', 2, 'line 1 is no record'),
    ('{"step": "1"}\n', 2, 'line 1 is no record'),
  ],
)
def test_a_damaged_log_is_refused_and_kept(
  open_, path, content, first_step, message
):
  path.write_text(content)
  with pytest.raises(
    ValueError, match=rf'metrics\.jsonl: {message}.*Put back a copy'
  ):
    open_(first_step)
  assert path.read_text() == content


def test_steps_may_begin_at_zero(open_, path):
  _write(open_(0), 0, 1)
  _write(open_(2), 2)
  assert len(metric_log.read(str(path))) == 3


def test_a_full_disk_leaves_whole_lines(tmp_path, open_, path, monkeypatch):
  log = open_(1)
  _write(log, 1)
  whole = path.read_bytes()
  write, calls = os.write, []

  def full(file, data):
    calls.append(data)
    if len(calls) > 1:
      raise OSError(errno.ENOSPC, 'No space left on device')
    return write(file, bytes(data)[:7])

  monkeypatch.setattr(os, 'write', full)
  with pytest.raises(OSError, match='No space left'):
    _write(log, 2)
  monkeypatch.undo()
  assert path.read_bytes() == whole
  _write(log, 2)
  assert [record['step'] for record in metric_log.read(str(path))] == [1, 2]


def test_one_step_is_one_write(open_, monkeypatch):
  log, write, calls = open_(1), os.write, []
  monkeypatch.setattr(
    os, 'write', lambda file, data: calls.append(data) or write(file, data)
  )
  _write(log, 1)
  assert [data[-2:] for data in calls] == [b'}\n']


def test_a_synced_log_survives_power_loss(open_, path, monkeypatch):
  synced = []
  fsync = os.fsync

  def note(descriptor):
    fsync(descriptor)
    status = os.fstat(descriptor)
    synced.append((status.st_ino, status.st_size))

  monkeypatch.setattr(os, 'fsync', note)
  log = open_(1)
  assert path.parent.stat().st_ino in [inode for inode, _ in synced]
  _write(log, 1, 2)
  log.sync()
  assert synced[-1] == (path.stat().st_ino, path.stat().st_size)
