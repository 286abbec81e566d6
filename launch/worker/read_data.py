"""Turns the data settings into a stream of batches that knows its position.

`prepare` makes the tokenizer and the caches once; `batches` reads them. The
training stream is a pure function of the manifest, the seed and the row's
index: it does not depend on the batch size, on how many processes read it, or
on where reading began, so the position of a run is one integer.
"""

from collections.abc import Iterator
import dataclasses
import os
from typing import Any
from typing import NamedTuple

import grain
import numpy as np

from jaxllm import batch as batch_lib
from launch.worker import durable
from launch.worker import rows as rows_lib
from launch.worker import sources
from launch.worker import token_cache
from launch.worker import tokenizer as tokenizer_lib

# Two batches ahead on one thread: a row costs about 20 us, and the cores
# belong to the training step.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """What to train on.

  Attributes:
    train: sources, mixed by weight.
    validation: sources of validation rows, each read whole and once; their
      weights are 1. Empty where `holdout_every` takes them from `train`, or
      where there is no validation.
    holdout_every: N > 1 keeps every N-th document of each training source for
      validation; 0 keeps none. A trained tokenizer may have seen them.
    sequence_length: inputs per row, L.
    packing: 'pack' lays documents end to end, 'pad' puts one in each row.
    tokenizer: which tokenizer.
    cache_dir: where tokens are kept between runs; `~` is expanded.
    shuffle_seed: decides the order of training rows; 0 to 2**32 - 1.

  Raises:
    ValueError: a value is out of its range, or two contradict each other.
  """

  train: tuple[sources.Source, ...]
  validation: tuple[sources.Source, ...]
  holdout_every: int
  sequence_length: int
  packing: str
  tokenizer: tokenizer_lib.TokenizerConfig
  cache_dir: str
  shuffle_seed: int

  def __post_init__(self):
    complaints = (
      (not self.train, 'train is empty; give it at least one source'),
      (
        self.packing not in ('pack', 'pad'),
        f'packing is {self.packing!r}; use pack or pad',
      ),
      (
        self.sequence_length < 1,
        f'sequence_length is {self.sequence_length}; it must be at least 1',
      ),
      (
        self.holdout_every < 0 or self.holdout_every == 1,
        f'holdout_every is {self.holdout_every}; use 0 or at least 2',
      ),
      (
        self.holdout_every > 0 and self.validation,
        'holdout_every and validation are both set; set one to 0 or empty',
      ),
      (
        not 0 <= self.shuffle_seed < 2**32,
        f'shuffle_seed is {self.shuffle_seed}; use 0 to 2**32 - 1',
      ),
      (not self.cache_dir, "cache_dir is ''; give it a directory"),
      (
        any(source.weight != 1 for source in self.validation),
        'the weight of a validation source has no effect; set it to 1',
      ),
    )
    for applies, complaint in complaints:
      if applies:
        raise ValueError(f'data: {complaint}.')


class Data(NamedTuple):
  """What `prepare` made.

  Attributes:
    train: endless training rows by index.
    validation: the validation rows in a fixed order; may be empty.
    tokenizer: the tokenizer of all rows.
    manifest: JSON that says what the rows were made of; two equal manifests
      give the same stream.
  """

  train: grain.MapDataset
  validation: grain.MapDataset
  tokenizer: tokenizer_lib.Tokenizer
  manifest: dict[str, Any]


def prepare(
  config: DataConfig,
  vocab_size: int,
  report: durable.Report,
  tell: durable.Tell,
) -> Data:
  """Makes the tokenizer and the token caches, or finds them made.

  Args:
    vocab_size: the model's; checked before hours of tokenising.
    report: `report(name, done, total, unit)`, called as work goes on; a new
      name begins a new piece of work.
    tell: called with a line when something deserves one.

  Raises:
    ValueError: the data cannot be used; the message says what to change.
    OSError: the disk is full; finished work stays.
  """
  for source in (*config.train, *config.validation):
    sources.list_files(source)  # every mistake at once, not one after hours
  cache_dir = os.path.abspath(os.path.expanduser(config.cache_dir))
  tokenizer = tokenizer_lib.prepare(
    config.tokenizer, config.train, cache_dir, report, tell
  )
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f'the tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is'
      f' {vocab_size}: raise it to {tokenizer.vocab_size} or more'
    )

  def caches(sources_, holdout_every):
    layout = token_cache.Layout(
      config.packing, config.sequence_length, holdout_every
    )
    return [
      token_cache.prepare(source, tokenizer, layout, cache_dir, report, tell)
      for source in sources_
    ]

  def rows(caches_, part):
    return [
      rows_lib.Rows(cache_dir, cache, part, tokenizer.pad_id)
      for cache in caches_
    ]

  train = caches(config.train, config.holdout_every)
  validation = caches(config.validation, 0)
  _check_enough(config, train)
  if config.holdout_every:
    validation_rows = rows(train, token_cache.HELD_OUT)
  else:
    validation_rows = rows(validation, token_cache.KEPT)
  weights = [source.weight for source in config.train]
  return Data(
    train=rows_lib.mix(
      rows(train, token_cache.KEPT), weights, config.shuffle_seed
    ),
    validation=rows_lib.concatenate(validation_rows),
    tokenizer=tokenizer,
    manifest={
      'sequence_length': config.sequence_length,
      'packing': config.packing,
      'holdout_every': config.holdout_every,
      'shuffle_seed': config.shuffle_seed,
      'tokenizer': tokenizer.digest,
      'train': _describe(config.train, train),
      'validation': _describe(config.validation, validation),
    },
  )


def batches(
  rows: grain.MapDataset, batch_size: int, start: int, part: range
) -> Iterator[tuple[int, batch_lib.Batch]]:
  """Endless batches of training rows, read ahead in the background.

  With a batch size of 4, the first batch from `start=8` of two processes:

      part=range(0, 2): (8, rows 8 and 9)    range(2, 4): (8, rows 10 and 11)

  Args:
    rows: `Data.train`.
    batch_size: rows of a batch over all processes, B.
    start: index of the first row to read.
    part: the rows of each batch to read, within range(B).

  Yields:
    `(index of the batch's first row, Batch of numpy arrays [len(part), L])`.
  """

  def read(number):
    position = start + number * batch_size
    return position, _collate([rows[position + i] for i in part])

  return _read_ahead(grain.MapDataset.range(2**62).map(read))


def validation_batches(
  rows: grain.MapDataset, batch_size: int, part: range
) -> Iterator[batch_lib.Batch]:
  """Every validation row once, in order.

  The last batch is filled up with rows of weight 0 in segment 0, so that all
  batches have one shape and all processes the same number of them.

  Args:
    rows: `Data.validation`.
    batch_size: rows of a batch over all processes, B.
    part: the rows of each batch to read, within range(B).

  Yields:
    Batches of numpy arrays `[len(part), L]`.
  """

  def read(number):
    filler = (np.zeros_like(rows[0][0]),) * 2
    indices = [number * batch_size + i for i in part]
    return _collate([rows[i] if i < len(rows) else filler for i in indices])

  num_batches = -(-len(rows) // batch_size)
  return _read_ahead(grain.MapDataset.range(num_batches).map(read))


def compare_manifests(
  saved: dict[str, Any], current: dict[str, Any]
) -> list[str]:
  """Says in words how two manifests differ; empty where they agree."""
  differences = [
    f'{name} was {saved[name]!r}, is {current[name]!r}'
    for name in (
      *('sequence_length', 'packing', 'holdout_every'),
      *('shuffle_seed', 'tokenizer'),
    )
    if saved[name] != current[name]
  ]
  for role in ('train', 'validation'):
    old, new = saved[role], current[role]
    if len(old) != len(new):
      differences.append(f'{role} had {len(old)} sources, has {len(new)}')
    for number, (before, after) in enumerate(zip(old, new, strict=False)):
      name = f'{role}[{number}] ({after["name"]})'
      differences += [f'{name}: {line}' for line in _compare(before, after)]
  return differences


def _check_enough(config, caches):
  """There must be a full row to train on and, if asked, one to validate on."""
  needed = config.sequence_length + 1
  for source, cache in zip(config.train, caches, strict=True):
    num_tokens = sum(shard['tokens'] for shard in cache['shards'])
    # Packed, less than a row would be a row of mostly padding.
    is_full = config.packing == 'pad' or num_tokens >= needed
    num_rows = token_cache.count_rows(cache['shards'], token_cache.KEPT)
    if not (is_full and num_rows):
      raise ValueError(
        f'{sources.describe(source)} has {num_tokens} tokens, but a row of '
        f'data.sequence_length={config.sequence_length} needs {needed}; lower '
        'it or add text.'
      )
  if config.holdout_every and not any(
    token_cache.count_rows(cache['shards'], token_cache.HELD_OUT)
    for cache in caches
  ):
    raise ValueError(
      f'data.holdout_every is {config.holdout_every}, but no training source '
      'has that many documents, so nothing is left to validate on; lower it, '
      'or set it to 0.'
    )


def _describe(described, caches):
  return [
    {
      'name': sources.describe(source),
      'weight': source.weight,
      'kind': source.kind,
      'field': source.field,
      'split': source.split,
      'files': cache['files'],
      'digest': cache['digest'],
      'rows': token_cache.count_rows(cache['shards'], token_cache.KEPT),
      **{
        count: sum(shard[count] for shard in cache['shards'])
        for count in ('documents', 'skipped', 'truncated', 'tokens')
      },
    }
    for source, cache in zip(described, caches, strict=True)
  ]


def _collate(rows):
  tokens, segment_ids = zip(*rows, strict=True)
  return batch_lib.shift(np.stack(tokens), np.stack(segment_ids))


def _read_ahead(dataset):
  iterator = iter(dataset.to_iter_dataset(_READ_OPTIONS))
  try:
    yield from iterator
  finally:
    iterator.close()


def _compare(before, after):
  """Differences between two descriptions of a source."""
  for name in ('kind', 'field', 'split', 'weight'):
    if before[name] != after[name]:
      yield f'{name} was {before[name]!r}, is {after[name]!r}'
  same = True
  for line in _compare_files(before['files'], after['files']):
    same = False
    yield line
  if same and before['digest'] != after['digest']:
    yield 'its rows are made in another way by this version of the code'


def _compare_files(before, after):
  old = {file['name']: file for file in before}
  new = {file['name']: file for file in after}
  for name in sorted(old.keys() | new.keys()):
    if name not in new:
      yield f'file {name} was removed'
    elif name not in old:
      yield f'file {name} was added'
    elif old[name]['bytes'] != new[name]['bytes']:
      yield (
        f'file {name} was {old[name]["bytes"]} bytes, is {new[name]["bytes"]}'
      )
    elif old[name] != new[name]:
      yield f'file {name} has other content'
