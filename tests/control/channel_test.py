"""What is not signed, is old, or was changed is refused."""

import dataclasses
import os
import stat

import pytest

from launch.control import channel

_SECRET = b'0' * 64
_HEAD = channel.Head(epoch=3, sender='ab12', sequence=7)
_BODY = {'do': 'start', 'attempt': 1, 'text': 'é'}


def test_a_message_comes_back():
  content, headers = channel.seal(_SECRET, _HEAD, _BODY)
  assert channel.unseal(_SECRET, content, headers) == (_HEAD, _BODY)


@pytest.mark.parametrize(
  'change', [{'epoch': 4}, {'sender': 'ab13'}, {'sequence': 8}]
)
def test_no_part_of_the_head_can_be_changed(change):
  content, _ = channel.seal(_SECRET, _HEAD, _BODY)
  _, headers = channel.seal(_SECRET, _HEAD, _BODY)
  other = dataclasses.replace(_HEAD, **change)
  _, forged = channel.seal(b'1' * 64, other, _BODY)
  forged['X-Mac'] = headers['X-Mac']
  with pytest.raises(channel.RefusedError, match='same secret'):
    channel.unseal(_SECRET, content, forged)


def test_no_byte_of_the_body_can_be_changed():
  content, headers = channel.seal(_SECRET, _HEAD, _BODY)
  for at in range(len(content)):
    forged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    with pytest.raises(channel.RefusedError):
      channel.unseal(_SECRET, forged, headers)


@pytest.mark.parametrize('name', ['X-Epoch', 'X-Sender', 'X-Sequence', 'X-Mac'])
@pytest.mark.parametrize('value', [None, 'x'])
def test_a_message_without_a_signature_is_refused(name, value):
  content, headers = channel.seal(_SECRET, _HEAD, _BODY)
  headers[name] = value
  if value is None:
    del headers[name]
  with pytest.raises(channel.RefusedError):
    channel.unseal(_SECRET, content, headers)


def test_the_secret_is_made_once_and_for_us_alone(tmp_path):
  path = str(tmp_path / 'secret')
  secret = channel.make_secret(path)
  assert len(secret) == 64
  assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
  assert channel.make_secret(path) == channel.read_secret(path) == secret


@pytest.mark.parametrize('mode', [0o640, 0o604, 0o644])
def test_a_secret_that_others_may_read_is_none(tmp_path, mode):
  path = str(tmp_path / 'secret')
  channel.make_secret(path)
  os.chmod(path, mode)
  with pytest.raises(ValueError, match=f'mode {mode:04o}.*remove it'):
    channel.make_secret(path)


def test_an_empty_secret_is_none(tmp_path):
  path = tmp_path / 'secret'
  path.touch(mode=0o600)
  with pytest.raises(ValueError, match='0 characters'):
    channel.read_secret(str(path))
