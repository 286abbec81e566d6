"""Names for content: of files, and of JSON values."""

import json
from typing import Any

import xxhash

from launch.worker import sources

# How much of each end of a file is hashed: reading all of a large corpus would
# take longer than the start of a run may.
_HASHED_BYTES = 1 << 20


def of_files(files: list[sources.File]) -> list[dict[str, Any]]:
  """Names, sizes and hashes of both ends of files."""
  described = []
  for file in files:
    with sources.open_file(file) as stream:
      hasher = xxhash.xxh3_64(stream.read(_HASHED_BYTES))
      stream.seek(max(file.num_bytes - _HASHED_BYTES, 0))
      hasher.update(stream.read(_HASHED_BYTES))
    described.append(
      {'name': file.name, 'bytes': file.num_bytes, 'hash': hasher.hexdigest()}
    )
  return described


def of_json(content: Any) -> str:
  """A hex name for JSON content."""
  return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
