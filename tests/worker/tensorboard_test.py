"""TensorBoard's files hold each step when `write` returns, or it raises."""

import errno
import resource
import struct

import pytest
import tensorboardX
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from launch.worker import tensorboard


def _events(directory):
  """All events of a directory; asserts both checksums of each record."""
  files = sorted(directory.iterdir())
  content, events = b''.join(file.read_bytes() for file in files), []
  while content:
    length, of_length = struct.unpack('<QI', content[:12])
    data = content[12 : 12 + length]
    (of_data,) = struct.unpack('<I', content[12 + length : 16 + length])
    assert of_length == record_writer.masked_crc32c(content[:8])
    assert of_data == record_writer.masked_crc32c(data)
    events.append(event_pb2.Event.FromString(data))
    content = content[16 + length :]
  return events


def _meaning(events):
  """Values, and the steps at which earlier files end, in order."""
  told = []
  for event in events:
    assert event.wall_time > 0 or not event.HasField('summary')
    told += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    if event.HasField('session_log'):
      assert event.session_log.status == event_pb2.SessionLog.START
      told.append((event.step, 'purge'))
  return told


def test_a_file_says_what_tensorboards_own_writer_says(tmp_path):
  steps = [
    (4, {'loss': 2.5, 'poet/angle': 0.125}),
    (5, {'loss': float('inf'), 'poet/angle': 1e-3}),
  ]
  file = tensorboard.EventFile(str(tmp_path / 'a'), 4)
  other = tensorboardX.SummaryWriter(str(tmp_path / 'b'), purge_step=4)
  for step, values in steps:
    file.write(step, values)
    for name, value in values.items():
      other.add_scalar(name, value, step)
  # Not yet closed: a killed worker's values are there.
  events = _events(tmp_path / 'a')
  file.close()
  other.close()
  assert _meaning(events) == _meaning(_events(tmp_path / 'b'))
  assert len(_meaning(events)) == 5
  assert events[0].file_version == _events(tmp_path / 'b')[0].file_version
  (name,) = [path.name for path in (tmp_path / 'a').iterdir()]
  assert name.startswith('events.out.tfevents.')


def test_a_restart_within_a_second_keeps_what_is_there(tmp_path):
  for first in (1, 3):
    file = tensorboard.EventFile(str(tmp_path), first)
    file.write(first, {'loss': float(first)})
    file.close()
  assert _meaning(_events(tmp_path)) == [
    (1, 'purge'),
    (1, 'loss', 1.0),
    (3, 'purge'),
    (3, 'loss', 3.0),
  ]


def test_a_write_that_fails_raises_at_once(tmp_path):
  file = tensorboard.EventFile(str(tmp_path), 1)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  # A limit on the file's size stands for the disk's.
  resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
  try:
    with pytest.raises(OSError, match='too large') as raised:
      file.write(1, {f'value{number}': 1.0 for number in range(50)})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert raised.value.errno == errno.EFBIG
  file.close()
