"""Binds a config to a workdir: a workdir holds one run, with one config.

`config.json` is the config's plain form, which the worker reads; `run.json`
holds what the first start found out and every later one must repeat.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import json
import math
import os
from typing import Any

import ml_collections

from launch.control import cluster

# The groups and keys that may change between two starts of one run: they decide
# none of the numbers that it logs, `mesh` only their last digits. (`evaluate`
# does: the validation losses.)
CHANGEABLE = (
  'checkpoint',
  'data.cache_dir',
  'launch',
  'log',
  'mesh',
  'profile',
  'sample',
)


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
  """The config's `launch` group.

  Attributes:
    limits: when to give up.
    grace_s: seconds that a worker asked to stop may take to save.
    heartbeat_timeout_s: seconds of silence after which a host is lost.
    collective_timeout_s: see `environment.of_worker`.
    deterministic: the config's `train.deterministic`; see there, too.
  """

  limits: cluster.Limits
  grace_s: float
  heartbeat_timeout_s: float
  collective_timeout_s: float
  deterministic: bool


def launch_settings(config: ml_collections.ConfigDict) -> LaunchSettings:
  """Reads and checks the config's `launch` group.

  Args:
    config: has `launch` with max_restarts, max_restarts_without_progress,
      backoff_s, grace_s, join_timeout_s, heartbeat_timeout_s,
      collective_timeout_s and stuck_timeout_s, and `train.deterministic`.

  Raises:
    ValueError: when a key is missing or has no sensible value.
  """
  group = config.get('launch')
  if not isinstance(group, ml_collections.ConfigDict):
    raise ValueError(
      'the config has no group `launch`; add config.launch = '
      'dict(max_restarts=100, max_restarts_without_progress=3, backoff_s=1.0, '
      'grace_s=60.0, join_timeout_s=300.0, heartbeat_timeout_s=30.0, '
      'collective_timeout_s=600.0, stuck_timeout_s=1800.0)'
    )
  deterministic = config.get('train', {}).get('deterministic')
  if not isinstance(deterministic, bool):
    raise ValueError(
      f'train.deterministic is {deterministic!r}; set it to True or False'
    )
  return LaunchSettings(
    limits=cluster.Limits(
      max_restarts=_at_least(0, group, 'max_restarts', int),
      # At 0 the first crash would count as a restart that did not help.
      max_restarts_without_progress=_at_least(
        1, group, 'max_restarts_without_progress', int
      ),
      backoff_s=_at_least(0, group, 'backoff_s', float),
      join_timeout_s=_at_least(1, group, 'join_timeout_s', float),
      stuck_timeout_s=_at_least(1, group, 'stuck_timeout_s', float),
    ),
    grace_s=_at_least(0, group, 'grace_s', float),
    heartbeat_timeout_s=_at_least(1, group, 'heartbeat_timeout_s', float),
    collective_timeout_s=_at_least(1, group, 'collective_timeout_s', float),
    deterministic=deterministic,
  )


def to_plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Turns a config into JSON values.

  Example: ConfigDict({'a': (1, {'b': 0.1}), 'c': None}) gives
  {'a': [1, {'b': 0.1}], 'c': None}. Floats round-trip through JSON exactly.

  Args:
    config: nests groups, lists and tuples of numbers, strings, booleans, None.

  Raises:
    ValueError: when it holds anything else, or a value that was never set.
  """
  return _plain(config, path='config')


def bind(workdir: str, plain: dict[str, Any]) -> None:
  """Makes `plain` the config of the workdir, unless it holds another's results.

  Before there are results, a start was perhaps refused for a setting, and the
  corrected command takes the workdir over.

  Args:
    workdir: an existing directory.
    plain: from `to_plain`.

  Raises:
    ValueError: when the workdir holds results of a run that computes something
      else; then nothing on the disk has changed.
    OSError: when it cannot be read or written.
  """
  path = os.path.join(workdir, 'config.json')
  text = json.dumps(plain, indent=2) + '\n'
  if not _has_results(workdir):
    # It says which data the run began on, and the run has not begun.
    with contextlib.suppress(FileNotFoundError):
      os.remove(os.path.join(workdir, 'data.json'))
  elif os.path.exists(path):
    _refuse_another_run(workdir, old=_read_json(path), new=json.loads(text))
  _write_atomically(path, text)


def recorded_num_cores(
  workdir: str, environment: Mapping[str, str], processes: int
) -> int:
  """Returns the number of cores a worker's XLA shall see, at every start.

  XLA on CPU splits its sums by the number of cores, so a run resumed with
  another number would log other bits.

  Args:
    workdir: an existing directory; the first start records the number there.
    environment: its NPROC, where set, decides the first time.
    processes: workers on this host, which else share its cores.

  Raises:
    ValueError: when NPROC is no number, or the record cannot be read.
    OSError: when it cannot be read or written.
  """
  path = os.path.join(workdir, 'run.json')
  if os.path.exists(path):
    recorded = _read_json(path).get('num_cores')
    if not isinstance(recorded, int) or recorded < 1:
      raise ValueError(
        f'{path} has num_cores={recorded!r}; restore the file, or pass another '
        '--workdir'
      )
    return recorded
  share = max(1, _num_visible_cores() // processes)
  text = environment.get('NPROC') or str(share)
  if not text.isdecimal() or int(text) < 1:
    raise ValueError(f'NPROC={text!r} is not a number of cores; unset it')
  _write_atomically(path, json.dumps({'num_cores': int(text)}) + '\n')
  return int(text)


def _at_least(
  minimum: int, group: ml_collections.ConfigDict, key: str, kind: type
) -> Any:
  if key not in group:
    raise ValueError(f'the config has no key launch.{key}; add it')
  value = group[key]
  accepted = int if kind is int else int | float
  if (
    not isinstance(value, accepted)
    or isinstance(value, bool)
    or not math.isfinite(value)
    or value < minimum
  ):
    raise ValueError(
      f'launch.{key} is {value!r}; set it to {kind.__name__} >= {minimum}, '
      f'e.g. --config.launch.{key}=3'
    )
  return kind(value)


def _plain(value: Any, path: str) -> Any:
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, list | tuple):
    return [
      _plain(item, f'{path}[{index}]') for index, item in enumerate(value)
    ]
  if isinstance(value, ml_collections.ConfigDict | dict):
    try:
      items = list(value.items())
    except ml_collections.config_dict.RequiredValueError as error:
      raise ValueError(f'{path} has a key without value: {error}') from error
    for key, _ in items:
      if not isinstance(key, str):
        raise ValueError(f'{path} has the key {key!r}; keys must be strings')
    return {key: _plain(item, f'{path}.{key}') for key, item in items}
  raise ValueError(
    f'{path} is a {type(value).__name__}; a config may hold numbers, strings, '
    'booleans, None, and groups, lists and tuples of them'
  )


def _refuse_another_run(
  workdir: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
  old, new = (
    {key: text for key, text in _flat(tree).items() if not _may_change(key)}
    for tree in (old, new)
  )
  differing = [
    key
    for key in sorted({*old, *new})
    if old.get(key, '(absent)') != new.get(key, '(absent)')
  ]
  if not differing:
    return
  shown = [
    f'{key}: {old.get(key, "(absent)"):.80} -> {new.get(key, "(absent)"):.80}'
    for key in differing[:5]
  ]
  if len(differing) > 5:
    shown.append(f'and {len(differing) - 5} more')
  remedy = 'pass another --workdir'
  if _has_checkpoint(workdir):
    checkpoints = os.path.join(workdir, 'checkpoints')
    remedy += (
      f', and --config.init_from={checkpoints} to begin with the weights of '
      'this one'
    )
  raise ValueError(
    f'{workdir} holds a run with another config ({"; ".join(shown)}); {remedy}'
  )


def _may_change(key: str) -> bool:
  """Whether a flat key, such as 'log.every', is in CHANGEABLE."""
  return any(
    key == name or key.startswith((f'{name}.', f'{name}['))
    for name in CHANGEABLE
  )


def _has_results(workdir: str) -> bool:
  log = os.path.join(workdir, 'metrics.jsonl')
  logged = os.path.exists(log) and os.path.getsize(log) > 0
  return logged or _has_checkpoint(workdir)


def _has_checkpoint(workdir: str) -> bool:
  try:
    with os.scandir(os.path.join(workdir, 'checkpoints')) as entries:
      return any(entry.name.isdecimal() and entry.is_dir() for entry in entries)
  except (FileNotFoundError, NotADirectoryError):
    return False


def _flat(tree: Any, path: str = '') -> dict[str, str]:
  """Maps each leaf's path to its JSON text: {'a': [1]} -> {'a[0]': '1'}."""
  if isinstance(tree, dict) and tree:
    prefix = f'{path}.' if path else ''
    children = [(f'{prefix}{key}', value) for key, value in tree.items()]
  elif isinstance(tree, list) and tree:
    children = [(f'{path}[{index}]', value) for index, value in enumerate(tree)]
  else:
    return {path: json.dumps(tree)}
  return {
    key: text
    for child_path, child in children
    for key, text in _flat(child, child_path).items()
  }


def _num_visible_cores() -> int:
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _read_json(path: str) -> dict[str, Any]:
  with open(path, encoding='utf-8') as file:
    try:
      value = json.load(file)
    except ValueError as error:
      raise ValueError(
        f'{path} is not JSON ({error}); restore it, or pass another --workdir'
      ) from error
  if not isinstance(value, dict):
    raise ValueError(
      f'{path} is no JSON object; restore it, or pass another --workdir'
    )
  return value


def _write_atomically(path: str, text: str) -> None:
  temporary = f'{path}.tmp'
  try:
    with open(temporary, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError:
    if os.path.exists(temporary):
      os.remove(temporary)
    raise
