"""How a worker ends: each exception's exit code and its one line."""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
from typing import Any

import jax

from launch.control.protocol import ExitCode
from launch.worker import run_settings


class Preempted(Exception):
  """A stop was requested and everything is saved."""


class NotFinite(Exception):
  """Training diverged: NaN, infinity, or POET's angles out of range."""


class OutOfMemory(Exception):
  """The model and its batch do not fit on the device."""


class BadSetting(Exception):
  """A setting, a path or the data is wrong; found before the first step."""


@dataclasses.dataclass
class MemoryReport:
  """What the compiled step needs; `analysis` is set once it is compiled."""

  analysis: Any = None


def describe(error: BaseException) -> tuple[ExitCode, str]:
  """The exit code and the line that an exception stands for."""
  match error:
    case Preempted():
      return ExitCode.PREEMPTED, str(error)
    case NotFinite():
      return ExitCode.NOT_FINITE, str(error)
    case OutOfMemory() | MemoryError():
      return ExitCode.OUT_OF_MEMORY, str(error) or 'the host is out of memory'
    case BadSetting():
      return ExitCode.USER_ERROR, str(error)
    case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
      where = f' ({error.filename})' if error.filename else ''
      return (
        ExitCode.DISK_FULL,
        f'the disk is full{where}: free space and run the same command again;'
        f' earlier checkpoints are intact [{error}]',
      )
    case jax.errors.JaxRuntimeError() if _is_of_peers(str(error)):
      return (
        ExitCode.PEER_LOST,
        f'another process of the run died, hung or is late [{error}]',
      )
  return ExitCode.CRASHED, f'{type(error).__name__}: {error}'


def _is_of_peers(text: str) -> bool:
  """Whether an error of jax comes from the processes' ways to meet."""
  signs = ('Gloo ', 'NCCL', 'Barrier timed out', 'coordination service')
  return any(sign in text for sign in signs)


@contextlib.contextmanager
def before_the_first_step() -> Iterator[None]:
  """Turns the errors of preparation into `BadSetting`: a restart won't heal."""
  try:
    yield
  except ValueError as error:
    raise BadSetting(str(error)) from error
  except (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
  ) as error:
    raise BadSetting(
      f'{error.filename}: {error.strerror}; name another path or change its'
      ' permissions'
    ) from error


@contextlib.contextmanager
def memory_report(
  settings: run_settings.RunSettings,
) -> Iterator[MemoryReport]:
  """Turns an allocation failure into a report with remedies."""
  report = MemoryReport()
  try:
    yield report
  except jax.errors.JaxRuntimeError as error:
    # The CPU reports an INTERNAL error with the second text.
    if not any(
      sign in str(error) for sign in ('RESOURCE_EXHAUSTED', 'Out of memory')
    ):
      raise
    raise OutOfMemory(_explain(settings, report)) from error


def _explain(settings: run_settings.RunSettings, report: MemoryReport) -> str:
  train = settings.train
  needs = 'the step could not even be compiled or its state allocated'
  if report.analysis is not None:
    needs = (
      f'the step needs {report.analysis.argument_size_in_bytes / 1e9:.1f} GB of'
      ' state and inputs and'
      f' {report.analysis.temp_size_in_bytes / 1e9:.1f} GB of work space'
    )
  statistics = jax.devices()[0].memory_stats() or {}
  limit = statistics.get('bytes_limit')
  has = f', the device has {limit / 1e9:.1f} GB' if limit else ''
  return (
    f'out of memory: {needs}{has}; in this order try a larger'
    f' train.microbatches (now {train.microbatches} for a batch of'
    f' {train.batch_size}), model.remat=full (now {settings.model.remat}), a'
    f' smaller train.loss_chunk_tokens (now {train.loss_chunk_tokens}) or a'
    ' smaller model'
  )
