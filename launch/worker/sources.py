"""Where documents come from: text, JSON lines, Parquet, TFDS, the stdlib.

A source is a list of files in a stable order, and a file is a sequence of
documents (strings). Nothing here keeps state, so any file can be read again
from its start, by any process, with the same result.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import glob
import gzip
import json
import os
import pathlib
import random
import re
import sysconfig
from typing import BinaryIO
from typing import NamedTuple
import zlib

from array_record.python import array_record_data_source
import pyarrow
from pyarrow import parquet

# The settings each kind reads; the others must be empty.
_SETTINGS = {
  'text': ('files',),
  'jsonl': ('files', 'field'),
  'parquet': ('files', 'field'),
  'tfds': ('directory', 'split', 'field'),
  'stdlib': (),
}

# Installed packages, caches, and modules removed between Python versions.
_STDLIB_LEFT_OUT = frozenset(
  (
    '__pycache__',
    'dist-packages',
    'idlelib',
    'lib2to3',
    'site-packages',
    'test',
    'tests',
  )
)

# Files read side by side for a sample: enough for variety, few to hold open.
_SAMPLE_WINDOW = 32


@dataclasses.dataclass(frozen=True)
class Source:
  """One corpus.

  Attributes:
    kind: 'text' (a file is a document), 'jsonl' (an object per line; `.gz` is
      unpacked), 'parquet', 'tfds' (a prepared array_record directory) or
      'stdlib' (the running Python's own modules).
    weight: share of rows in the mixture, relative to the other sources.
    files: glob of a text, jsonl or parquet source; `~` and `**` are expanded.
    field: key or column that holds the text (jsonl, parquet, tfds).
    directory: the version directory of a tfds source.
    split: name of a tfds split.

  Raises:
    ValueError: the kind is unknown, one of its settings is empty, or a setting
      is given that it does not read.
  """

  kind: str
  weight: float
  files: str
  field: str
  directory: str
  split: str

  def __post_init__(self):
    if self.kind not in _SETTINGS:
      raise ValueError(
        f'Source kind {self.kind!r} is unknown; use one of '
        f'{", ".join(_SETTINGS)}.'
      )
    if not 0 < self.weight < float('inf'):
      raise ValueError(
        f'Weight {self.weight} of {describe(self)} must be a positive number.'
      )
    reads, settings = _SETTINGS[self.kind], dataclasses.asdict(self)
    for name in ('files', 'field', 'directory', 'split'):
      value = settings[name]
      if name in reads and not value:
        raise ValueError(f'A {self.kind} source needs `{name}`; it is empty.')
      if name not in reads and value:
        raise ValueError(
          f"A {self.kind} source does not read `{name}`; set it to '' "
          f'(it is {value!r}).'
        )


class File(NamedTuple):
  """A file of a source; `name` is relative to the root of the source."""

  path: str
  name: str
  num_bytes: int


def describe(source: Source) -> str:
  """A few words that name the source to its owner."""
  where = {
    'tfds': f'{source.directory} ({source.split})',
    'stdlib': "Python's standard library",
  }
  return where.get(source.kind, source.files)


def list_files(source: Source) -> list[File]:
  """Lists the files of a source, sorted by name.

  Raises:
    ValueError: there is none, or the directory is no prepared TFDS dataset.
  """
  if source.kind == 'stdlib':
    root = sysconfig.get_path('stdlib')
    paths = list(_stdlib_paths(root))
  elif source.kind == 'tfds':
    root = os.path.expanduser(source.directory)
    paths = _tfds_paths(source)
  else:
    pattern = os.path.expanduser(source.files)
    root = _glob_root(pattern)
    paths = [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
    if os.path.isdir(pattern):
      raise ValueError(
        f'{source.files} is a directory; name its files: {source.files}/*.'
      )
  if not paths:
    raise ValueError(
      f'{describe(source)} matches no file (looked from {os.getcwd()}); check '
      'the path of this data source.'
    )
  files = [
    File(path, pathlib.Path(os.path.relpath(path, root)).as_posix(), size)
    for path, size in ((path, os.path.getsize(path)) for path in paths)
  ]
  return sorted(files, key=lambda file: file.name)


def read_documents(source: Source, file: File) -> Iterator[tuple[str, int]]:
  """Reads the documents of one file in order.

  Yields:
    `(text, bytes of the file read so far)`. A stdlib file that is not UTF-8
    yields an empty text.

  Raises:
    ValueError: the file cannot be read, is damaged, or lacks the field; the
      message names the file and the line or row.
  """
  readers = {
    'text': _read_text,
    'stdlib': _read_text,
    'jsonl': _read_jsonl,
    'parquet': _read_parquet,
    'tfds': _read_tfds,
  }
  return readers[source.kind](source, file)


def open_file(file: File) -> BinaryIO:
  """Opens a file for reading bytes; a refusal is a ValueError."""
  try:
    return open(file.path, 'rb')
  except PermissionError as error:
    raise ValueError(
      f'{file.path} cannot be read: permission denied; run chmod +r on it.'
    ) from error


def sample(sources: Sequence[Source], num_bytes: int) -> Iterator[str]:
  """Documents from all over the sources, about `num_bytes` of text.

  Each source gives its weight's share. Its files are taken in a fixed random
  order, a few at a time in turns, so that the sample is not just the first
  file. A document longer than what remains is cut.
  """
  total = sum(source.weight for source in sources)
  for source in sources:
    remaining = int(num_bytes * source.weight / total)
    for text in _interleave(source):
      if remaining <= 0:
        break
      text = text[:remaining]
      remaining -= len(text.encode())
      yield text


def _interleave(source: Source) -> Iterator[str]:
  """One document of each open file in turn, until all files are read."""
  files = list_files(source)
  random.Random(0).shuffle(files)
  for begin in range(0, len(files), _SAMPLE_WINDOW):
    window = files[begin : begin + _SAMPLE_WINDOW]
    open_files = [read_documents(source, file) for file in window]
    while open_files:
      still_open = []
      for documents in open_files:
        for text, _ in documents:
          still_open.append(documents)
          yield text
          break
      open_files = still_open


def _stdlib_paths(root: str) -> Iterator[str]:
  for directory, children, names in os.walk(root):
    children[:] = [name for name in children if name not in _STDLIB_LEFT_OUT]
    for name in names:
      if name.endswith(('.py', '.txt')):
        yield os.path.join(directory, name)


def _glob_root(pattern: str) -> str:
  """The directory above the first wildcard: `a/b/*/c.txt` -> `a/b`."""
  parts = pathlib.Path(pattern).parts
  fixed = []
  for part in parts[:-1]:
    if re.search(r'[*?[]', part):
      break
    fixed.append(part)
  return os.path.join(*fixed) if fixed else '.'


def _read_text(source, file):
  with open_file(file) as stream:
    raw = stream.read()
  try:
    text = raw.decode()
  except UnicodeDecodeError as error:
    # A handful of the stdlib's files are in other encodings on purpose; a
    # user's file in another encoding is a mistake to report.
    if source.kind != 'stdlib':
      raise ValueError(
        f'{file.path} is not UTF-8 (byte {error.start}); convert it, for '
        'example with iconv.'
      ) from error
    text = ''
  yield text, len(raw)


def _read_jsonl(source, file):
  number = 0
  with open_file(file) as raw:
    is_gzip = file.path.endswith('.gz')
    stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
    try:
      for number, line in enumerate(stream, start=1):
        if line.strip():
          yield _json_field(source, file, number, line), raw.tell()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
      raise ValueError(
        f'{file.path} is broken gzip after line {number} ({error}); fetch or '
        'compress it again.'
      ) from error


def _json_field(source, file, number, line):
  place = f'{file.path} line {number}'
  try:
    record = json.loads(line)
  except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
    raise ValueError(
      f'{place} is not JSON ({error}); repair or remove the line.'
    ) from error
  if not isinstance(record, dict):
    raise ValueError(
      f'{place} is a JSON {type(record).__name__}, not an object; write '
      f'{{"{source.field}": ...}}.'
    )
  if source.field not in record:
    raise ValueError(_no_field(source, place, record))
  text = record[source.field]
  if not isinstance(text, str):
    raise ValueError(
      f'{place}: field {source.field!r} holds {type(text).__name__}, not a '
      'string; choose another field or repair the line.'
    )
  # JSON can write half a UTF-16 pair ("\ud800"), which no encoder accepts.
  if not text.isascii() and re.search('[\ud800-\udfff]', text):
    raise ValueError(
      f'{place}: field {source.field!r} holds a lone surrogate, which is no '
      'character; repair or remove the line.'
    )
  return text


def _read_parquet(source, file):
  with open_file(file) as raw:
    try:
      table = parquet.ParquetFile(raw)
    except pyarrow.ArrowInvalid as error:
      reason = str(error).splitlines()[0]
      raise ValueError(f'{file.path} is not Parquet: {reason}') from error
    schema = table.schema_arrow
    if source.field not in schema.names:
      raise ValueError(_no_field(source, file.path, schema.names))
    column_type = schema.field(source.field).type
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string)
    if not any(check(column_type) for check in is_text):
      raise ValueError(
        f'{file.path}: column {source.field!r} holds {column_type}, not '
        'strings; choose another field.'
      )
    number = 0
    for rows in table.iter_batches(1024, columns=[source.field]):
      for text in rows.column(0).to_pylist():
        number += 1
        if text is None:
          raise ValueError(
            f'{file.path} row {number}: column {source.field!r} is null; '
            'remove such rows.'
          )
        yield text, file.num_bytes * number // table.metadata.num_rows


def _tfds_paths(source: Source) -> list[str]:
  builder = _tfds_builder(source)
  splits = builder.info.splits
  if source.split not in splits:
    raise ValueError(
      f'{source.directory} has no split {source.split!r}; it has '
      f'{", ".join(splits)}.'
    )
  return [str(path) for path in splits[source.split].filepaths]


def _tfds_builder(source: Source):
  # Imported here: it takes half a second, which only this kind should pay.
  import tensorflow_datasets as tfds

  directory = os.path.expanduser(source.directory)
  try:
    builder = tfds.builder_from_directory(directory)
  except (tfds.core.dataset_info.DatasetInfoFileError, OSError) as error:
    raise ValueError(
      f'{source.directory} is no prepared TFDS dataset; give the version '
      'directory, the one that holds dataset_info.json.'
    ) from error
  if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
    raise ValueError(
      f'{source.directory} is stored as {builder.info.file_format.value}; '
      "prepare it with file_format='array_record'."
    )
  if source.field not in builder.info.features:
    raise ValueError(_no_field(source, source.directory, builder.info.features))
  return builder


def _read_tfds(source, file):
  # Only the field's own feature, so that no image beside it is decoded.
  features = _tfds_builder(source).info.features
  features = type(features)({source.field: features[source.field]})
  with array_record_data_source.ArrayRecordDataSource(file.path) as records:
    for number, record in enumerate(records, start=1):
      text = features.deserialize_example_np(record)[source.field]
      if not isinstance(text, bytes):
        raise ValueError(
          f'{source.directory}: field {source.field!r} holds '
          f'{type(text).__name__}, not text; choose another field.'
        )
      try:
        decoded = text.decode()
      except UnicodeDecodeError as error:
        raise ValueError(
          f'{file.path} record {number}: field {source.field!r} is not UTF-8.'
        ) from error
      yield decoded, file.num_bytes * number // len(records)


def _no_field(source: Source, place: str, names) -> str:
  return (
    f'{place} has no field {source.field!r}; it has {", ".join(sorted(names))}.'
  )
