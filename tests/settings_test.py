"""Settings: every name known and given, every value of its type."""

import dataclasses
from typing import NamedTuple

import pytest

from jaxllm import settings


class _Inner(NamedTuple):
  size: int


@dataclasses.dataclass(frozen=True)
class _Outer:
  rate: float
  name: str
  is_on: bool
  items: tuple[_Inner, ...]
  words: tuple[str, ...]
  inner: _Inner | None

  def __post_init__(self):
    if self.rate < 0:
      raise ValueError('rate is negative')


_VALUES = {
  'rate': 1,
  'name': 'a',
  'is_on': True,
  'items': [{'size': 1}, {'size': 2}],
  'words': ['x'],
  'inner': None,
}


def test_nested_groups_lists_and_none_are_built():
  expected = _Outer(1, 'a', True, (_Inner(1), _Inner(2)), ('x',), None)
  assert settings.build(_Outer, _VALUES, 'outer') == expected
  values = {**_VALUES, 'inner': {'size': 3}}
  assert settings.build(_Outer, values, 'outer').inner == _Inner(3)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'rats': 1}, r'^outer: unknown setting rats \(did you mean rate\?\); it'),
    ({'rate': 'fast'}, r"^outer.rate='fast' must be of type float"),
    ({'rate': True}, r'^outer.rate=True must be of type float'),
    ({'is_on': 1}, r'^outer.is_on=1 must be of type bool'),
    ({'items': 3}, r'^outer.items=3 must be a list'),
    ({'items': [{'size': 1.5}]}, r'^outer.items\[0\].size=1.5 must be of type'),
    ({'items': [{}]}, r'^outer.items\[0\]: missing setting size; add it'),
    ({'words': [1]}, r'^outer.words\[0\]=1 must be of type str'),
    ({'inner': 4}, r'^outer.inner=4 must be a group of settings'),
    ({'rate': -1}, r'^outer: rate is negative'),
  ],
)
def test_what_does_not_fit_is_named_by_its_path(change, message):
  with pytest.raises(ValueError, match=message):
    settings.build(_Outer, {**_VALUES, **change}, 'outer')


def test_the_root_has_no_prefix():
  with pytest.raises(ValueError, match=r'^config: missing setting name'):
    settings.build(
      _Outer, {k: v for k, v in _VALUES.items() if k != 'name'}, ''
    )
