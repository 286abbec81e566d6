"""Frozen dataclasses from a config's plain values, with nothing left to chance.

A config's defaults live in its file and nowhere else, so every setting must be
given, every name must be known, and every value must have its type.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import types
from typing import Any
from typing import get_args
from typing import get_origin
from typing import get_type_hints


def build(kind: Any, values: Any, where: str) -> Any:
  """Builds `kind` of plain values, such as JSON holds.

  Example:
    build(Point, {'x': 1, 'y': 2}, 'point') = Point(x=1, y=2)
    build(Point, {'x': 1, 'z': 2}, 'point') raises
      ValueError: point: unknown setting z; it has x, y

  Args:
    kind: a dataclass or NamedTuple; its annotations name bool, int, float, str,
      such classes, tuples of one of these, or one of these or None.
    values: by name; lists stand for tuples, integers may stand for floats.
    where: the config's path to these values, '' for its root.

  Raises:
    ValueError: a name is unknown or missing, a value has another type, or the
      class refuses it; the message begins with the path.
  """
  if not isinstance(values, Mapping):
    raise ValueError(f'{where}={values!r} must be a group of settings')
  hints = get_type_hints(kind)
  _check_names(list(hints), values, where or 'config')
  prefix = f'{where}.' if where else ''
  converted = {
    name: _convert(hint, values[name], f'{prefix}{name}')
    for name, hint in hints.items()
  }
  try:
    return kind(**converted)
  except ValueError as error:
    group = where.partition('.')[0].partition('[')[0]
    if str(error).startswith(group):
      raise
    raise ValueError(f'{where}: {error}') from error


def _check_names(
  known: list[str], values: Mapping[str, Any], where: str
) -> None:
  for name in values:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      hint = f' (did you mean {near[0]}?)' if near else ''
      raise ValueError(
        f'{where}: unknown setting {name}{hint}; it has {", ".join(known)}'
      )
  if missing := [name for name in known if name not in values]:
    raise ValueError(f'{where}: missing setting {", ".join(missing)}; add it')


def _convert(hint: Any, value: Any, where: str) -> Any:
  if get_origin(hint) is tuple:
    if not isinstance(value, list | tuple):
      raise ValueError(f'{where}={value!r} must be a list')
    item = get_args(hint)[0]
    return tuple(
      _convert(item, entry, f'{where}[{i}]') for i, entry in enumerate(value)
    )
  if isinstance(hint, types.UnionType):  # X | None
    if value is None:
      return None
    (hint,) = (arm for arm in get_args(hint) if arm is not types.NoneType)
  if dataclasses.is_dataclass(hint) or hasattr(hint, '_fields'):
    return value if isinstance(value, hint) else build(hint, value, where)
  # Python counts True as an int and JSON writes 10000.0 as 10000.
  accepted = int | float if hint is float else hint
  if not isinstance(value, accepted) or isinstance(value, bool) != (
    hint is bool
  ):
    raise ValueError(f'{where}={value!r} must be of type {hint.__name__}')
  return value
