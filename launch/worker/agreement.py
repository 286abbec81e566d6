"""What all processes of a run decide together.

Every process calls these functions, in the same order and from its main thread;
each gets the same result, or raises the same error. They go through jax's
coordination service and touch no device. With one process they only call what
they are given.
"""

from collections.abc import Callable
import contextlib
import itertools
import json
import re
from typing import Any
from typing import TypeVar

import jax
from jax._src import distributed

_T = TypeVar('_T')

# How long one process waits for the slowest, which may be reading its part of a
# large checkpoint from a slow disk. One that has died ends the others earlier.
_TIMEOUT_S = 1200

# Errors that keep their type on the way from process to process.
_KINDS = (MemoryError, jax.errors.JaxRuntimeError, ValueError)

# The same in all processes, as they call in the same order.
_rounds = itertools.count()
_barriers = itertools.count()


def is_first() -> bool:
  """Whether this is the process that decides, and writes what users read."""
  return jax.process_index() == 0


def of_first(decide: Callable[[], _T]) -> _T:
  """What `decide` returns in the first process, where alone it is called.

  Args:
    decide: returns JSON values; tuples become lists.

  Raises:
    Exception: what `decide` raised, see `everyone`.
    jax.errors.JaxRuntimeError: another process has not come in time.
  """
  if jax.process_count() == 1:
    return decide()
  result, error = _outcome(decide) if is_first() else (None, None)
  said = _exchange({'result': result, 'error': _described(error)})
  _raise_first([said[0]['error']], error)
  return said[0]['result']


def everyone(act: Callable[[], _T]) -> _T:
  """This process's result of `act`, if no process has failed.

  Args:
    act: must not wait for other processes, unless with a timeout.

  Raises:
    Exception: what one process raised, on all of them; one with an errno, or
      else one of the lowest process. An OSError keeps its errno, a ValueError,
      MemoryError or JaxRuntimeError its type.
    jax.errors.JaxRuntimeError: another process has not come in time.
  """
  if jax.process_count() == 1:
    return act()
  result, error = _outcome(act)
  said = _exchange(_described(error))
  _raise_first(said, error)
  return result


class Barriers:
  """Barriers in a row for background threads, which a failure opens, too.

  A process that fails between two of them says so and passes the next one; the
  others find that behind it, and fail as well instead of waiting in vain.
  """

  def __init__(self, number: int):
    """Makes them, in all processes at the same place.

    Args:
      number: how many there are.
    """
    self._name = f'jaxllm/barriers/{next(_barriers)}'
    self._number = number
    self._passed = 0
    self._failed = False

  def wait(self, timeout_s: float) -> None:
    """Returns when all processes are here.

    Raises:
      Exception: the failure of another process, as `everyone` raises it.
      jax.errors.JaxRuntimeError: another process has not come in time.
    """
    client = distributed.global_state.client
    try:
      self._pass(timeout_s)
      failures = client.key_value_dir_get(f'{self._name}/failed/')
      _raise_first([json.loads(text) for _, text in sorted(failures)], None)
    except Exception:
      self._failed = True  # with all others: there is no barrier to open
      raise

  def fail(self, error: Exception) -> None:
    """Tells the others, who wait for this process at the next barrier."""
    if self._failed or self._passed == self._number or jax.process_count() == 1:
      return
    self._failed = True
    client = distributed.global_state.client
    client.key_value_set(
      f'{self._name}/failed/{jax.process_index():06}',
      json.dumps(_described(error)),
    )
    # Where it has timed out meanwhile, the others know.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._pass(_TIMEOUT_S)

  def _pass(self, timeout_s: float) -> None:
    place = f'{self._name}/{self._passed}'
    distributed.global_state.client.wait_at_barrier(
      place, max(1, int(timeout_s * 1000))
    )
    self._passed += 1


def error_number(error: BaseException | None) -> int | None:
  """The errno behind an error of the file system, however it is wrapped."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return error.errno
    # The array store's form: "... Permission denied [os_error_code='13' ...".
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
      return int(match[1])
    error = error.__cause__ or error.__context__
  return None


def _outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
  try:
    return act(), None
  except Exception as error:
    return None, error


def _exchange(value: Any) -> list[Any]:
  """Every process's value, in the order of the processes."""
  client, number = distributed.global_state.client, next(_rounds)
  place = f'jaxllm/agreement/{number}'
  client.key_value_set(f'{place}/{jax.process_index():06}', json.dumps(value))
  client.wait_at_barrier(place, _TIMEOUT_S * 1000)
  values = sorted(client.key_value_dir_get(f'{place}/'))
  if is_first() and number:
    # Whoever is at this barrier has read the values of the one before.
    client.key_value_delete(f'jaxllm/agreement/{number - 1}/')
  return [json.loads(text) for _, text in values]


def _described(error: Exception | None) -> dict[str, Any] | None:
  """An error as JSON, as `_rebuilt` takes it."""
  if error is None:
    return None
  is_os_error = isinstance(error, OSError) and error.errno is not None
  filename = getattr(error, 'filename', None)
  kinds = [kind.__name__ for kind in _KINDS if isinstance(error, kind)]
  return {
    'process': jax.process_index(),
    'kind': kinds[0] if kinds else '',
    'name': type(error).__name__,
    'errno': error_number(error),
    'text': error.strerror if is_os_error else str(error),
    'filename': None if filename is None else str(filename),
  }


def _raise_first(
  errors: list[dict[str, Any] | None], own: Exception | None
) -> None:
  """Raises the error that counts for all processes, if there is one."""
  errors = [error for error in errors if error is not None]
  if errors:
    said = min(errors, key=lambda e: (e['errno'] is None, e['process']))
    raise _rebuilt(said) from own


def _rebuilt(said: dict[str, Any]) -> Exception:
  number, text = said['errno'], said['text']
  if number is not None:
    return OSError(number, text, said['filename'])
  for kind in _KINDS:
    if said['kind'] == kind.__name__:
      return kind(text)
  return RuntimeError(f'process {said["process"]}: {said["name"]}: {text}')
