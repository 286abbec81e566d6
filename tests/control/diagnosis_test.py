"""What jax leaves in a log names the cause; anything else stays as it is."""

import pytest

from launch.control import diagnosis
from launch.control import protocol

ExitCode = protocol.ExitCode
_ABORTED = 128 + 6
_FATAL = (
  'F0101 00:00:00.0 7 client.h:80] Terminating process because the JAX'
  ' distributed service detected fatal errors.'
)


@pytest.mark.parametrize(
  ('log_tail', 'exit_code', 'line'),
  [
    (
      f'{_FATAL} absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded RPC:'
      ' /xla.coordination.CoordinationService/RegisterTask',
      ExitCode.PEER_LOST,
      'did not meet in time',
    ),
    (
      f'{_FATAL} ABORTED: 1 unexpectedly tried to connect with a different'
      ' incarnation. It has likely restarted.',
      ExitCode.USER_ERROR,
      'the same number',
    ),
    (
      f'{_FATAL} This most likely indicates that another task died',
      ExitCode.PEER_LOST,
      'died or stopped answering',
    ),
    ('Fatal Python error: Aborted', _ABORTED, 'Fatal Python error: Aborted'),
    ('', _ABORTED, ''),
  ],
)
def test_jax_says_why_it_aborted(log_tail, exit_code, line):
  explained, text = diagnosis.explain(_ABORTED, '', log_tail)
  assert explained == exit_code
  assert line in text
  assert '\n' not in text


def test_last_words_beat_the_log():
  assert diagnosis.explain(_ABORTED, 'mine', _FATAL) == (_ABORTED, 'mine')


def test_an_exit_of_its_own_is_taken_at_its_word():
  assert diagnosis.explain(3, '', f'{_FATAL}\nlast') == (3, 'last')
