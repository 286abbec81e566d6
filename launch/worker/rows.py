"""Stores token rows in files that are read by index."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import errno
import itertools
import os
from typing import Any

from array_record.python import array_record_data_source
from array_record.python import array_record_module
import grain
import numpy as np

from launch.worker import durable


class Rows:
  """The rows of one part of a cache, by index.

  Attributes:
    length: inputs per row, L.
  """

  def __init__(
    self, cache_dir: str, manifest: dict[str, Any], part: str, pad_id: int
  ):
    self.length = manifest['length']
    self._directory = os.path.join(cache_dir, manifest['digest'])
    self._pad_id = pad_id
    self._dtype = token_dtype(manifest['vocab_size'])
    files = [shard['files'][part] for shard in manifest['shards']]
    self._num_rows = sum(file['rows'] for file in files)
    paths = [
      os.path.join(self._directory, file['name'])
      for file in files
      if file['rows']
    ]
    self._records = None
    if paths:
      with self._damage():
        self._records = array_record_data_source.ArrayRecordDataSource(paths)
      assert len(self._records) == self._num_rows, self._directory

  def __len__(self) -> int:
    return self._num_rows

  def __getitem__(self, index) -> tuple[np.ndarray, np.ndarray]:
    """`(tokens [L + 1], segment_ids [L + 1])`, int32.

    Raises:
      OSError: what is stored is not what was written.
    """
    with self._damage():
      record = self._records[index]
    return decode(record, self.length, self._pad_id, self._dtype)

  def __repr__(self) -> str:
    return f'Rows({self._num_rows} x {self.length})'

  @contextlib.contextmanager
  def _damage(self):
    try:
      yield
    except RuntimeError as error:  # a checksum failed
      reason = f'Token cache is damaged; delete {self._directory} ({error})'
      raise OSError(errno.EIO, reason) from error


def mix(
  sources_rows: Sequence[Rows], weights: Sequence[float], seed: int
) -> grain.MapDataset:
  """An endless mixture; each source in a new order in each of its epochs."""
  shuffled = [
    grain.MapDataset.source(rows).shuffle(seed=(seed + number) % 2**32).repeat()
    for number, rows in enumerate(sources_rows)
  ]
  if len(shuffled) == 1:
    return shuffled[0]
  return grain.MapDataset.mix(shuffled, weights)


def concatenate(sources_rows: Sequence[Rows]) -> grain.MapDataset:
  """All rows in order; there may be none."""
  filled = [rows for rows in sources_rows if len(rows)]
  if not filled:
    return grain.MapDataset.source([])
  return grain.MapDataset.concatenate(
    [grain.MapDataset.source(rows) for rows in filled]
  )


def write(file: str, records: Iterator[bytes]) -> dict[str, Any]:
  """Writes a file of records, none where there are no records.

  Returns:
    The file's `name`, its `rows` and `bytes`.

  Raises:
    OSError: the disk is full or broken; no file is left.
  """
  name = os.path.basename(file)
  temporary = f'{file}.tmp'
  first = next(records, None)
  if first is None:
    return {'name': name, 'rows': 0, 'bytes': 0}
  num_rows = 0
  try:
    writer = array_record_module.ArrayRecordWriter(
      temporary, 'group_size:1,uncompressed'
    )
    for record in itertools.chain([first], records):
      with _disk_errors(file):
        writer.write(record)
      num_rows += 1
    with _disk_errors(file):
      writer.close()
    num_bytes = os.path.getsize(temporary)
    durable.publish(temporary, file)
  except BaseException:
    # What a full disk needs most is room.
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)
    raise
  return {'name': name, 'rows': num_rows, 'bytes': num_bytes}


def token_dtype(vocab_size: int) -> str:
  """The smallest stored type that holds every token."""
  return '<u2' if vocab_size <= 1 << 16 else '<u4'


def encode(tokens: np.ndarray, segment_ids: np.ndarray, dtype: str) -> bytes:
  """Number of segments, their lengths (both uint32), the tokens in them.

  `tokens 5 6 7 8 0`, `segment_ids 1 1 1 2 0` -> `2 | 3 1 | 5 6 7 8`.
  """
  lengths = np.bincount(segment_ids)[1:]
  header = np.array([len(lengths), *lengths], '<u4')
  return header.tobytes() + tokens[: lengths.sum()].astype(dtype).tobytes()


def decode(record: bytes, length: int, pad_id: int, dtype: str):
  """The inverse of `encode`; padding becomes `pad_id` in segment 0."""
  num_segments = int(np.frombuffer(record, '<u4', count=1)[0])
  lengths = np.frombuffer(record, '<u4', count=num_segments, offset=4)
  stored = np.frombuffer(record, dtype, offset=4 * (num_segments + 1))
  tokens = np.full(length + 1, pad_id, np.int32)
  tokens[: len(stored)] = stored
  segment_ids = np.zeros(length + 1, np.int32)
  segment_ids[: len(stored)] = np.repeat(
    np.arange(1, num_segments + 1), lengths
  )
  return tokens, segment_ids


@contextlib.contextmanager
def _disk_errors(file: str) -> Iterator[None]:
  """Gives the library's RuntimeError the number that the system gave it."""
  try:
    yield
  except RuntimeError as error:
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    found = [n for n in numbers if os.strerror(n) in str(error)]
    number = found[0] if found else errno.EIO
    raise OSError(number, os.strerror(number), file) from error
