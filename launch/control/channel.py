"""Signs what launchers say to each other, and refuses what is not signed.

A message is a JSON object with four headers: the epoch (which launch of the run
it belongs to), the sender, a number that grows with every message of a sender,
and an HMAC-SHA256 over all of them and the body, under a secret that lies in a
file of the run with mode 0600. So a message that somebody made up, changed,
sent twice or kept from an earlier launch is refused.
"""

from collections.abc import Mapping
import dataclasses
import hmac
import json
import os
import secrets
import stat
from typing import Any

MAX_BODY_BYTES = 8 << 20


class RefusedError(Exception):
  """A message is not from whom it says, or not for now."""


@dataclasses.dataclass(frozen=True)
class Head:
  """What a message says about itself.

  Attributes:
    epoch: number of the launch, counted over the run; 0 before a sender knows.
    sender: names a sender that lives once.
    sequence: grows with every message of the sender.
  """

  epoch: int
  sender: str
  sequence: int


def seal(
  secret: bytes, head: Head, body: dict[str, Any]
) -> tuple[bytes, dict[str, str]]:
  """The bytes of a message and its headers."""
  content = json.dumps(body, separators=(',', ':')).encode()
  headers = {
    'Content-Type': 'application/json',
    'X-Epoch': str(head.epoch),
    'X-Sender': head.sender,
    'X-Sequence': str(head.sequence),
    'X-Mac': _mac(secret, head, content),
  }
  return content, headers


def unseal(
  secret: bytes, content: bytes, headers: Mapping[str, str]
) -> tuple[Head, dict[str, Any]]:
  """What a message says; the caller compares epoch and sequence.

  Raises:
    RefusedError: it is not signed with the secret.
  """
  try:
    head = Head(
      int(headers['X-Epoch']), headers['X-Sender'], int(headers['X-Sequence'])
    )
    given = headers['X-Mac']
  except (KeyError, ValueError) as error:
    raise RefusedError('the message has no signature') from error
  if not hmac.compare_digest(given, _mac(secret, head, content)):
    raise RefusedError(
      'the signature does not fit: the launchers do not have the same secret'
    )
  return head, json.loads(content)


def make_secret(path: str) -> bytes:
  """The secret of a run; the first call makes the file, readable by us alone.

  Raises:
    ValueError: the file that is there may be read by others.
    OSError: it cannot be made or read.
  """
  try:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  except FileExistsError:
    return read_secret(path)
  with open(fd, 'w', encoding='ascii') as file:
    file.write(secrets.token_hex(32))
  return read_secret(path)


def read_secret(path: str) -> bytes:
  """The secret in a file.

  Raises:
    ValueError: the file may be read by others, or is no secret.
    OSError: it cannot be read.
  """
  with open(path, encoding='ascii') as file:
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & 0o077:
      raise ValueError(
        f'{path} has mode {mode:04o}, so others may know the secret; remove it,'
        ' and the first launcher makes another'
      )
    text = file.read().strip()
  if len(text) < 32:
    raise ValueError(
      f'{path} holds {len(text)} characters, too few for a secret; remove it,'
      ' and the first launcher makes another'
    )
  return text.encode()


def _mac(secret: bytes, head: Head, content: bytes) -> str:
  fields = json.dumps(dataclasses.astuple(head)).encode()
  return hmac.digest(secret, fields + b'\n' + content, 'sha256').hex()
