"""Tokenises and packs a source once, into rows that can be read in any order.

A cache is a directory named after everything that decides its content, so it
is never stale and never rebuilt needlessly. It is written in shards of whole
documents; a finished shard has a small JSON beside it that says where the next
begins, so a killed preparation goes on from there. `manifest.json` comes last:
where it exists, the cache is complete.

    <cache_dir>/<digest>.lock
    <cache_dir>/<digest>/00000-kept.array_record      rows to train on
    <cache_dir>/<digest>/00000-held_out.array_record  rows to validate on
    <cache_dir>/<digest>/00000.json
    <cache_dir>/<digest>/manifest.json
"""

from collections.abc import Iterator
import dataclasses
import itertools
import os
import shutil
from typing import Any

import numpy as np

from jaxllm import batch
from launch.worker import durable
from launch.worker import fingerprint
from launch.worker import rows
from launch.worker import sources
from launch.worker import tokenizer as tokenizer_lib

# Raise it when the same inputs would give other rows than before.
FORMAT_VERSION = 1
# Text per shard: a minute of tokenising on two cores, at most, is repeated.
SHARD_BYTES = 64 << 20
# Text per call of the tokenizer: enough to keep the cores busy.
_ENCODE_BYTES = 2 << 20

KEPT = 'kept'
HELD_OUT = 'held_out'


@dataclasses.dataclass(frozen=True)
class Layout:
  """How documents become rows.

  Attributes:
    packing: 'pack' (documents end to end) or 'pad' (one document per row).
    length: inputs per row, L.
    holdout_every: N > 0 holds out each document whose index in its source is
      N - 1 modulo N; 0 holds out none.
  """

  packing: str
  length: int
  holdout_every: int


def prepare(
  source: sources.Source,
  tokenizer: tokenizer_lib.Tokenizer,
  layout: Layout,
  cache_dir: str,
  report: durable.Report,
  tell: durable.Tell,
) -> dict[str, Any]:
  """Makes sure that the cache of a source exists, and describes it.

  Args:
    report: called with the bytes read so far while rows are written.
    tell: called with a line when another process holds the cache, or when a
      damaged one is repaired.

  Returns:
    The manifest: what decided the content, its digest and the shards.

  Raises:
    ValueError: the source cannot be read or holds no document, or `cache_dir`
      cannot be written.
    OSError: the disk is full; finished shards stay.
  """
  files = sources.list_files(source)
  content = _content(source, files, tokenizer, layout)
  digest = fingerprint.of_json(content)
  directory = os.path.join(cache_dir, digest)
  # Without the lock first: a finished cache may lie where only others write.
  if manifest := _finished(directory):
    return manifest
  with durable.locked(directory, tell):
    if manifest := _finished(directory):
      return manifest
    manifest_file = os.path.join(directory, 'manifest.json')
    if manifest := durable.read_json(manifest_file):
      damaged = next(_damaged(directory, manifest['shards']))
      tell(f'{damaged} is missing or cut short; writing it again.')
      os.unlink(manifest_file)
    writer = _Writer(source, files, tokenizer, layout, directory, report)
    shards = writer.shards()
    if sources.list_files(source) != files:
      shutil.rmtree(directory)  # its name promises other content
      raise ValueError(
        f'The files of {sources.describe(source)} changed while they were '
        'read; run again when they are complete.'
      )
    if not any(count_rows(shards, part) for part in (KEPT, HELD_OUT)):
      raise ValueError(
        f'{sources.describe(source)} holds no text; point this data source at '
        'files with documents in them.'
      )
    manifest = {**content, 'digest': digest, 'shards': shards}
    durable.write_json(manifest_file, manifest)
  return manifest


def count_rows(shards: list[dict[str, Any]], part: str) -> int:
  """Rows of one part (`KEPT` or `HELD_OUT`) over all shards."""
  return sum(shard['files'][part]['rows'] for shard in shards)


def _content(source, files, tokenizer, layout):
  """All that decides what the rows are."""
  return {
    'format_version': FORMAT_VERSION,
    'shard_bytes': SHARD_BYTES,
    'kind': source.kind,
    'field': source.field,
    'split': source.split,
    'files': fingerprint.of_files(files),
    'tokenizer': tokenizer.digest,
    'vocab_size': tokenizer.vocab_size,
    **dataclasses.asdict(layout),
  }


class _Writer:
  """Writes the shards of one cache."""

  def __init__(self, source, files, tokenizer, layout, directory, report):
    self._source = source
    self._files = files
    self._tokenizer = tokenizer
    self._layout = layout
    self._directory = directory
    self._report = report
    self._total_bytes = sum(file.num_bytes for file in files)

  def shards(self) -> list[dict[str, Any]]:
    """Writes the shards that are not there yet; describes all of them.

    A description holds counts, the files, and `next`: the place of the first
    document after the shard, as (file, document in it).
    """
    shards, documents = [], None
    place, index = (0, 0), 0
    while True:
      file = os.path.join(self._directory, f'{len(shards):05d}.json')
      shard = durable.read_json(file)
      if shard and not any(_damaged(self._directory, [shard])):
        documents = None
      else:
        documents = documents or self._documents(*place)
        shard = self._write_shard(documents, f'{len(shards):05d}', index)
        durable.write_json(file, shard)
      shards.append(shard)
      place, index = shard['next'], index + shard['documents']
      if shard['is_last']:
        return shards

  def _documents(self, first_file, first_document):
    """Every document from a place on.

    Yields:
      `(text, place of the next document, bytes of the source read so far)`.
    """
    before = sum(file.num_bytes for file in self._files[:first_file])
    skip = first_document
    for number in range(first_file, len(self._files)):
      file = self._files[number]
      documents = enumerate(sources.read_documents(self._source, file), start=1)
      for count, (text, read) in itertools.islice(documents, skip, None):
        yield text, [number, count], before + read
      before, skip = before + file.num_bytes, 0

  def _write_shard(self, documents, name, first_index):
    tally = dict.fromkeys(('documents', 'skipped', 'tokens', 'truncated'), 0)
    tally.update(next=[len(self._files), 0], is_last=True)
    # The held-out documents wait in memory: a shard has few of them.
    held_out = []
    kept = self._kept(documents, tally, first_index, held_out)
    files = {
      part: rows.write(
        os.path.join(self._directory, f'{name}-{part}.array_record'),
        self._records(encoded, tally),
      )
      for part, encoded in ((KEPT, kept), (HELD_OUT, held_out))
    }
    return {**tally, 'files': files}

  def _kept(self, documents, tally, first_index, held_out):
    """Tokens of each document to keep, end token included; fills `held_out`."""
    every = self._layout.holdout_every
    for texts, read in self._chunks(documents, tally):
      for tokens in self._tokenizer.encode_batch(texts):
        tokens = np.append(tokens, np.int32(self._tokenizer.end_id))
        index = first_index + tally['documents']
        tally['documents'] += 1
        tally['tokens'] += len(tokens)
        if every and index % every == every - 1:
          held_out.append(tokens)
        else:
          yield tokens
      name = f'Tokenising {sources.describe(self._source)}'
      self._report(name, read, self._total_bytes, 'bytes')

  def _chunks(self, documents, tally):
    """The texts of one shard a few MiB at a time, and the bytes read."""
    texts, chunk_bytes, shard_bytes = [], 0, 0
    for text, place, read in documents:
      if text:
        texts.append(text)
      else:
        tally['skipped'] += 1
      num_bytes = len(text.encode())
      chunk_bytes += num_bytes
      shard_bytes += num_bytes
      is_full = shard_bytes >= SHARD_BYTES
      if is_full or chunk_bytes >= _ENCODE_BYTES:
        yield texts, read
        texts, chunk_bytes = [], 0
      if is_full:
        tally.update(next=place, is_last=False)
        return
    yield texts, self._total_bytes

  def _records(self, encoded, tally):
    """The rows of documents, as they are stored."""
    length, pad_id = self._layout.length, self._tokenizer.pad_id
    dtype = rows.token_dtype(self._tokenizer.vocab_size)
    if self._layout.packing == 'pack':
      for tokens, segment_ids in batch.pack(encoded, length):
        yield rows.encode(tokens, segment_ids, dtype)
      return
    for document in encoded:
      tally['truncated'] += len(document) > length + 1
      yield rows.encode(*batch.pad(document, length, pad_id), dtype)


def _finished(directory: str) -> dict[str, Any] | None:
  """The manifest of a cache that is complete and undamaged."""
  manifest = durable.read_json(os.path.join(directory, 'manifest.json'))
  if manifest and not any(_damaged(directory, manifest['shards'])):
    return manifest
  return None


def _damaged(directory: str, shards: list[dict[str, Any]]) -> Iterator[str]:
  """Files that are missing or not of their recorded size."""
  for shard in shards:
    for part in shard['files'].values():
      file = os.path.join(directory, part['name'])
      if part['rows'] and not (
        os.path.exists(file) and os.path.getsize(file) == part['bytes']
      ):
        yield file
