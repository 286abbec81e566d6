"""The wire format: what is written is read back, and nothing else is."""

import math
import signal

import pytest

from launch.control import protocol


def _event(kind, step=None, **data):
  return protocol.Event(kind, 'worker', 1.5, step, data)


@pytest.mark.parametrize(
  'event',
  [
    _event('message', text='two\nlines, \u00fcnicode \ud800'),
    _event('progress', step=7, done=7, loss=0.1 + 0.2),
    _event('run_started', nested={'a': [1, None, True]}),
  ],
)
def test_an_event_round_trips_in_one_line(event):
  line = protocol.encode(
    protocol.Event(
      protocol.EventKind(event.kind), 'worker', 1.5, event.step, event.data
    )
  )
  assert line.endswith(b'\n')
  assert line.count(b'\n') == 1
  assert protocol.decode(line) == event


def test_a_loss_that_is_not_finite_round_trips():
  event = _event(protocol.EventKind.PROGRESS, done=1, loss=math.nan)
  assert math.isnan(protocol.decode(protocol.encode(event)).data['loss'])


_GOOD = protocol.encode(_event(protocol.EventKind.MESSAGE, text='x')).decode()


@pytest.mark.parametrize(
  'line',
  [
    '',
    'Traceback (most recent call last):',
    '3',
    '[]',
    '{}',
    '[' * 100_000,
    _GOOD[:-10],
    _GOOD.replace('"message"', '"massage"'),
    _GOOD.replace('"message"', '["message"]'),
    _GOOD.replace('"worker"', 'null'),
    _GOOD.replace('1.5', 'NaN'),
    _GOOD.replace('1.5', '1' + '0' * 400),
    _GOOD.replace('"step":null', '"step":1.5'),
    _GOOD.replace('"step":null', '"step":true'),
    _GOOD.replace('"step":null', f'"step":{2**63}'),
    _GOOD.replace('{"text":"x"}', '[]'),
    _GOOD.replace('{"text":"x"}', '{}'),
    _GOOD.replace('"x"', '5'),
    _GOOD.replace('"step"', '"stage"'),
  ],
)
def test_a_line_that_is_no_event_is_refused(line):
  assert line != _GOOD
  with pytest.raises(ValueError, match=r'event|JSON'):
    protocol.decode(line.encode())


def test_bytes_that_are_no_text_are_refused():
  with pytest.raises(ValueError, match='JSON'):
    protocol.decode(b'\xff\xfe\x00')


def test_a_sender_that_forgets_a_key_is_told():
  with pytest.raises(ValueError, match='exit_code'):
    protocol.encode(
      _event(protocol.EventKind.ERROR, process=0, text='x', traceback='')
    )


def test_a_count_is_not_negative():
  with pytest.raises(ValueError, match='done'):
    protocol.encode(_event(protocol.EventKind.PROGRESS, done=-1))


def test_exit_codes_have_names():
  assert protocol.describe_exit(128 + signal.SIGKILL) == 'killed by SIGKILL'
  assert protocol.describe_exit(11) == 'out of memory'
  assert protocol.describe_exit(77) == 'exit code 77'
  assert protocol.describe_exit(255) == 'exit code 255'
