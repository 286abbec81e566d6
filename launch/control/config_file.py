"""Loads a config file and applies the command line's overrides to it."""

from collections.abc import Sequence
import difflib
import os
import traceback
import types
from typing import Any

from absl import flags
import ml_collections
from ml_collections import config_flags
from ml_collections.config_flags import config_path


def load(path: str) -> ml_collections.ConfigDict:
  """Runs a config file and returns what its `get_config` returns.

  Args:
    path: the file, with `:ARG` appended where `get_config` takes an argument,
      e.g. 'configs/poet_60m.py:adam'.

  Raises:
    ValueError: when there is no such file, or it is no config file.
  """
  file, *arguments = path.split(':', 1)
  module = _run(file)
  get_config = module.__dict__.get('get_config')
  if not callable(get_config):
    raise ValueError(
      f'{file} has no function get_config; a config file defines '
      '`def get_config(arg=None)` and returns a ml_collections.ConfigDict'
    )
  try:
    config = get_config(*arguments)
  except Exception as error:
    raise ValueError(_failure(path, file, error)) from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ValueError(
      f'get_config of {file} returned {type(config).__name__}; return a '
      'ml_collections.ConfigDict'
    )
  return config


def override(
  config: ml_collections.ConfigDict, arguments: Sequence[str]
) -> None:
  """Sets keys of a config, in place, and locks it.

  Args:
    config: a key keeps its type, as in `ml_collections.config_flags`.
    arguments: e.g. '--config.train.steps=50', '--config.data[0].weight=2',
      '--noconfig.train.remat'.

  Raises:
    ValueError: when a key does not exist or cannot take the value.
  """
  for argument in arguments:
    _check(config, argument)
  flag_values = flags.FlagValues()
  argv = ['', *arguments]
  try:
    config_flags.DEFINE_config_dict(
      'config', config, flag_values=flag_values, sys_argv=argv
    )
    flag_values(argv)
  except (
    flags.Error,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
  ) as error:
    raise ValueError(
      f'cannot apply {" ".join(arguments)}: {_one_line(error)}'
    ) from error


def _run(file: str) -> types.ModuleType:
  try:
    with open(file, encoding='utf-8') as opened:
      source = opened.read()
  except OSError as error:
    raise ValueError(
      f'cannot read the config file {file!r} ({error.strerror}); pass '
      '--config=FILE, e.g. --config=configs/quickstart.py'
    ) from error
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{file} is not a Python file; pass --config=FILE, e.g. '
      '--config=configs/quickstart.py'
    ) from error
  module = types.ModuleType('config_file')
  module.__file__ = os.path.abspath(file)
  try:
    # Not an import: that would leave a cached .pyc, which Python believes for a
    # file that is edited twice within a second.
    exec(compile(source, file, 'exec'), module.__dict__)
  except (Exception, SystemExit) as error:
    raise ValueError(_failure(file, file, error)) from error
  return module


def _failure(path: str, file: str, error: BaseException) -> str:
  lines = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.filename == file
  ]
  if isinstance(error, SyntaxError) and error.filename == file:
    lines.append(error.lineno)
  where = f' at line {lines[-1]}' if lines else ''
  return (
    f'the config file {path} failed{where}: '
    f'{type(error).__name__}: {_one_line(error)}; correct it and start again'
  )


def _check(config: ml_collections.ConfigDict, argument: str) -> None:
  """Refuses what config_flags would refuse in a less readable way."""
  name, equals, value = argument.partition('=')
  path = name.split('.', 1)[1]
  key_type = _type_at(config, path, argument)
  if not equals and key_type is not bool:
    raise ValueError(f'{argument} has no value; write {name}=VALUE')
  if issubclass(key_type, ml_collections.ConfigDict | dict):
    raise ValueError(
      f'{argument} sets a whole group; set its keys one by one, e.g. '
      f'{name}.KEY=VALUE'
    )
  if key_type is type(None):
    raise ValueError(
      f'{argument} sets a key without type, for it is None; in the config '
      'file, write ml_collections.config_dict.placeholder(str) for it, or set '
      'it there'
    )
  if issubclass(key_type, list):
    raise ValueError(
      f'{argument} sets a list; make it a tuple in the config file, or set it '
      'there'
    )
  if key_type in _PARSERS:
    try:
      _PARSERS[key_type].parse(value if equals else 'true')
    except ValueError as error:
      raise ValueError(
        f'{argument} needs a value of type {key_type.__name__}, not {value!r}'
      ) from error


_PARSERS = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
}


def _type_at(
  config: ml_collections.ConfigDict, path: str, argument: str
) -> type:
  """Walks to a key; an unknown one is an error that names its neighbours."""
  try:
    fields = config_path.split(path)
  except ValueError as error:
    raise ValueError(
      f'{argument} is no path of a key; write e.g. --config.train.steps=50 or '
      '--config.data[0].weight=2'
    ) from error
  holder, walked = config, 'config'
  for index, field in enumerate(fields):
    _check_field(holder, field, walked, argument)
    is_last = index == len(fields) - 1
    if is_last and isinstance(holder, tuple | list):
      raise ValueError(
        f'{argument} sets one item of {walked}; set all of it, e.g. '
        f'--{walked}={_example(holder)}'
      )
    if is_last and isinstance(holder, ml_collections.ConfigDict):
      return holder.get_type(field)
    holder = holder[field]
    walked += f'[{field}]' if isinstance(field, int) else f'.{field}'
  return type(holder)


def _check_field(holder: Any, field: Any, walked: str, argument: str) -> None:
  if isinstance(holder, tuple | list):
    if isinstance(field, int) and 0 <= field < len(holder):
      return
    raise ValueError(
      f'{argument}: {walked} has {len(holder)} items, so no [{field}]; '
      'they count from 0'
    )
  if not isinstance(holder, ml_collections.ConfigDict | dict):
    raise ValueError(
      f'{argument}: {walked} is {holder!r} and has no key {field}'
    )
  if field in holder:
    return
  known = sorted(map(str, holder))
  close = difflib.get_close_matches(str(field), known, n=1, cutoff=0.5)
  remedy = (
    f'did you mean {walked}.{close[0]}?'
    if close
    else f'its keys are {", ".join(known)}'
  )
  raise ValueError(f'{argument}: {walked} has no key {field}; {remedy}')


def _example(values: Sequence[Any]) -> str:
  return '"' + str(tuple(values)).replace(' ', '') + '"'


def _one_line(error: BaseException) -> str:
  return ' '.join(str(error).split())
