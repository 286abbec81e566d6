"""An error that travels from process to process keeps what readers look at.

What several processes do with it is in `checkpoint_processes_test`.
"""

import errno
import json

import jax
import pytest

from launch.worker import agreement
from launch.worker import outcome


def _sent(error):
  return agreement._rebuilt(json.loads(json.dumps(agreement._described(error))))


@pytest.mark.parametrize(
  'error',
  [
    OSError(errno.ENOSPC, 'No space left on device', '/disk'),
    PermissionError(errno.EACCES, 'Permission denied'),
    ValueError('train.steps=0: set it to 1 or more'),
    MemoryError(),
    jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'),
  ],
)
def test_the_user_reads_the_same(error):
  sent = _sent(error)
  assert type(sent) is type(error)
  assert outcome.describe(sent) == outcome.describe(error)
  assert agreement.error_number(sent) == agreement.error_number(error)


def test_an_error_around_one_of_the_disk_keeps_its_number():
  stored = ValueError("Error writing: no room [os_error_code='28' errno='X']")
  assert _sent(stored).errno == errno.ENOSPC
  outer = RuntimeError('not written')
  outer.__cause__ = OSError(errno.EACCES, 'no')
  assert _sent(outer).errno == errno.EACCES


def test_any_other_error_names_itself_and_its_process():
  assert str(_sent(KeyError('layers'))) == "process 0: KeyError: 'layers'"


def test_one_process_agrees_with_itself():
  error = KeyError('layers')

  def fail():
    raise error

  for ask in (agreement.of_first, agreement.everyone):
    assert ask(lambda: (1, 2)) == (1, 2)
    with pytest.raises(KeyError) as raised:
      ask(fail)
    assert raised.value is error
