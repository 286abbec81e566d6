"""The stream of batches: what it holds, and what it does not depend on."""

import copy
import dataclasses
import itertools
import json
import threading
import time

import numpy as np
import pytest

from jaxllm import batch as batch_lib
from jaxllm import settings as settings_lib
from launch.worker import read_data

_LENGTH = 8


def _settings(tmp_path, **changes):
  """Settings for a corpus of 20 documents, written at the first call."""
  corpus = tmp_path / 'corpus.jsonl'
  if not corpus.exists():
    _write(corpus, 'a', 20)
  settings = {
    'train': [_source(corpus)],
    'validation': [],
    'holdout_every': 0,
    'sequence_length': _LENGTH,
    'packing': 'pack',
    'tokenizer': {
      'file': '',
      'vocab_size': 258,
      'end_token': '<|end|>',
      'pad_token': '<|pad|>',
      'train_bytes': 1000,
    },
    'cache_dir': str(tmp_path / 'cache'),
    'shuffle_seed': 7,
  }
  return {**settings, **changes}


def _write(path, letter, count):
  lines = [json.dumps({'text': f'{letter}{i:02d}'}) for i in range(count)]
  path.write_text('\n'.join(lines))


def _source(path, weight=1.0):
  return {
    'kind': 'jsonl',
    'weight': weight,
    'files': str(path),
    'field': 'text',
    'directory': '',
    'split': '',
  }


def _prepare(tmp_path, **changes):
  config = settings_lib.build(
    read_data.DataConfig, _settings(tmp_path, **changes), 'data'
  )
  return read_data.prepare(
    config,
    2**16,
    lambda *_: None,
    lambda line: pytest.fail(f'unexpected: {line}'),
  )


def _part(batch_size, process_index, process_count):
  local = batch_size // process_count
  return range(process_index * local, (process_index + 1) * local)


def _take(rows, count, batch_size, start=0, process_index=0, process_count=1):
  part = _part(batch_size, process_index, process_count)
  stream = read_data.batches(rows, batch_size, start, part)
  taken = list(itertools.islice(stream, count))
  stream.close()
  return taken


def _texts(data, batch):
  """The text of each row of a batch; rows hold one document each."""
  return [data.tokenizer.decode(row) for row in batch.tokens]


def _rows(taken):
  return [
    tuple(array.tobytes() for array in row)
    for _, batch in taken
    for row in zip(*batch, strict=True)
  ]


def test_batches_are_shifted_rows(tmp_path):
  data = _prepare(tmp_path)
  ((position, batch),) = _take(data.train, 1, batch_size=3)
  tokens, segment_ids = zip(*[data.train[i] for i in range(3)], strict=True)
  expected = batch_lib.shift(np.stack(tokens), np.stack(segment_ids))
  assert position == 0
  for got, want in zip(batch, expected, strict=True):
    np.testing.assert_array_equal(got, want)
    assert got.dtype in (np.int32, np.float32)
    assert got.shape == (3, _LENGTH)


@pytest.mark.parametrize('batch_size', [1, 4, 6, 50])
def test_the_stream_does_not_depend_on_the_batch_size(tmp_path, batch_size):
  data = _prepare(tmp_path)
  ones = _rows(_take(data.train, 100, batch_size=1))
  taken = _take(data.train, 100 // batch_size, batch_size)
  assert [position for position, _ in taken] == [
    i * batch_size for i in range(len(taken))
  ]
  got = _rows(taken)
  assert got == ones[: len(got)]


@pytest.mark.parametrize('start', [1, 4, 37])
def test_reading_may_begin_anywhere(tmp_path, start):
  data = _prepare(tmp_path)
  ones = _rows(_take(data.train, 60, batch_size=1))
  taken = _take(data.train, 5, batch_size=4, start=start)
  assert taken[1][0] == start + 4
  assert _rows(taken) == ones[start : start + 20]


@pytest.mark.parametrize('process_count', [2, 3, 6])
def test_processes_share_each_batch_in_order(tmp_path, process_count):
  data = _prepare(tmp_path)
  whole = _take(data.train, 3, batch_size=6, start=5)
  parts = [
    _take(data.train, 3, 6, 5, index, process_count)
    for index in range(process_count)
  ]
  for number, (position, batch) in enumerate(whole):
    assert {part[number][0] for part in parts} == {position}
    together = [
      np.concatenate(a)
      for a in zip(*(p[number][1] for p in parts), strict=False)
    ]
    for got, want in zip(together, batch, strict=True):
      np.testing.assert_array_equal(got, want)


def test_each_epoch_holds_every_row_once_in_another_order(tmp_path):
  data = _prepare(tmp_path, packing='pad')
  epochs = [
    _texts(data, batch) for _, batch in _take(data.train, 3, batch_size=20)
  ]
  for texts in epochs:
    assert sorted(texts) == [f'a{i:02d}' for i in range(20)]
  assert len({tuple(texts) for texts in epochs}) == 3
  other = _prepare(tmp_path, packing='pad', shuffle_seed=8)
  assert _texts(other, _take(other.train, 1, 20)[0][1]) != epochs[0]


def test_the_order_of_a_seed_never_changes(tmp_path):
  # A run that resumes after an upgrade must go on in the order it began with.
  # Should a new version of grain shuffle otherwise, this fails, and the order
  # must become part of the manifest.
  data = _prepare(tmp_path, packing='pad')
  texts = [_texts(data, b)[0] for _, b in _take(data.train, 6, batch_size=1)]
  assert texts == ['a04', 'a13', 'a03', 'a07', 'a02', 'a09']


def test_sources_are_mixed_by_weight(tmp_path):
  for letter in 'bc':
    _write(tmp_path / letter, letter, 10)
  data = _prepare(
    tmp_path,
    packing='pad',
    train=[_source(tmp_path / 'b', 3.0), _source(tmp_path / 'c', 1.0)],
  )
  ((_, batch),) = _take(data.train, 1, batch_size=400)
  letters = ''.join(text[0] for text in _texts(data, batch))
  assert (letters.count('b'), letters.count('c')) == (300, 100)
  # Mixed evenly, not one after the other.
  assert all(letters[i : i + 8].count('c') == 2 for i in range(0, 400, 8))


def test_held_out_documents_are_never_trained_on(tmp_path):
  data = _prepare(tmp_path, packing='pad', holdout_every=5)
  ((_, batch),) = _take(data.train, 1, batch_size=64)
  validation = next(read_data.validation_batches(data.validation, 4, range(4)))
  assert _texts(data, validation) == ['a04', 'a09', 'a14', 'a19']
  assert set(_texts(data, batch)) == {
    f'a{i:02d}' for i in range(20) if i % 5 != 4
  }


@pytest.mark.parametrize(('batch_size', 'process_count'), [(4, 1), (6, 3)])
def test_validation_reads_every_row_once(tmp_path, batch_size, process_count):
  for letter in 'bc':
    _write(tmp_path / letter, letter, 5)
  data = _prepare(
    tmp_path,
    packing='pad',
    validation=[_source(tmp_path / 'b'), _source(tmp_path / 'c')],
  )
  parts = [
    list(
      read_data.validation_batches(
        data.validation,
        batch_size,
        _part(batch_size, index, process_count),
      )
    )
    for index in range(process_count)
  ]
  texts = []
  for batches in zip(*parts, strict=True):
    for batch in batches:
      assert batch.tokens.shape == (batch_size // process_count, _LENGTH)
      has_weight = batch.weights.sum(axis=1) > 0
      np.testing.assert_array_equal(has_weight, batch.segment_ids[:, 0] == 1)
      texts += [
        t for t, w in zip(_texts(data, batch), has_weight, strict=False) if w
      ]
  assert texts == [f'{letter}{i:02d}' for letter in 'bc' for i in range(5)]


def test_no_validation_is_no_batches(tmp_path):
  data = _prepare(tmp_path)
  assert list(read_data.validation_batches(data.validation, 4, range(4))) == []


def test_a_closed_stream_leaves_no_thread(tmp_path):
  data = _prepare(tmp_path)
  before = set(threading.enumerate())
  stream = read_data.batches(data.train, 2, 0, range(2))
  next(stream)
  assert set(threading.enumerate()) - before
  stream.close()
  deadline = time.monotonic() + 10
  while set(threading.enumerate()) - before:
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_damaged_rows_are_an_error_with_a_remedy(tmp_path):
  data = _prepare(tmp_path)
  (file,) = (tmp_path / 'cache').glob('*/*.array_record')
  raw = bytearray(file.read_bytes())
  raw[100:800] = bytes(700)
  file.write_bytes(raw)
  with pytest.raises(OSError, match=r'(?s)damaged; delete .*/cache/'):
    _take(data.train, 20, batch_size=4)


def test_the_manifest_is_json_and_repeatable(tmp_path):
  first = _prepare(tmp_path).manifest
  second = _prepare(tmp_path).manifest
  assert json.loads(json.dumps(first)) == first == second
  assert read_data.compare_manifests(first, second) == []
  (source,) = first['train']
  assert source['documents'] == 20
  assert source['tokens'] == 20 * 4
  assert source['rows'] == 10


@pytest.mark.parametrize(
  ('change', 'expected'),
  [
    ({'sequence_length': 4}, 'sequence_length was 8, is 4'),
    ({'packing': 'pad'}, "packing was 'pack', is 'pad'"),
    ({'shuffle_seed': 1}, 'shuffle_seed was 7, is 1'),
    ({'holdout_every': 2}, 'holdout_every was 0, is 2'),
  ],
)
def test_a_changed_setting_is_named(tmp_path, change, expected):
  before = _prepare(tmp_path).manifest
  after = _prepare(tmp_path, **change).manifest
  assert expected in read_data.compare_manifests(before, after)


def test_changed_sources_are_named(tmp_path):
  saved = _prepare(tmp_path).manifest
  saved['train'][0]['files'] = [
    {'name': name, 'bytes': size, 'hash': digest}
    for name, size, digest in (
      *(('kept', 1, 'x'), ('gone', 1, 'x'), ('longer', 1, 'x')),
      ('rewritten', 1, 'x'),
    )
  ]
  current = copy.deepcopy(saved)
  source = current['train'][0]
  del source['files'][1]
  source['files'][1]['bytes'] = 2
  source['files'][2]['hash'] = 'y'
  source['files'].append({'name': 'new', 'bytes': 1, 'hash': 'x'})
  source['weight'] = 2.0
  current['tokenizer'] = 'other'
  current['validation'] = [source]
  name = f'train[0] ({tmp_path}/corpus.jsonl)'
  assert read_data.compare_manifests(saved, current) == [
    f"tokenizer was '{saved['tokenizer']}', is 'other'",
    f'{name}: weight was 1.0, is 2.0',
    f'{name}: file gone was removed',
    f'{name}: file longer was 1 bytes, is 2',
    f'{name}: file new was added',
    f'{name}: file rewritten has other content',
    'validation had 0 sources, has 1',
  ]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'train': []}, 'train is empty'),
    ({'packing': 'chop'}, "packing is 'chop'; use pack or pad"),
    ({'sequence_length': 0}, 'sequence_length is 0'),
    ({'holdout_every': 1}, 'holdout_every is 1; use 0 or at least 2'),
    ({'shuffle_seed': -1}, 'shuffle_seed is -1'),
    ({'cache_dir': ''}, "cache_dir is ''"),
    ({'shufle_seed': 1}, 'data: unknown setting shufle_seed .*shuffle_seed'),
    ({'tokenizer': {'file': ''}}, 'data.tokenizer: missing setting vocab_size'),
    ({'train': [{'kind': 'text'}]}, r'data.train\[0\]: missing setting weight'),
    ({'validation': [_source('a', 0.5)]}, 'weight of a validation source'),
    ({'validation': [_source('a')], 'holdout_every': 2}, 'are both set'),
    (
      {'train': [{**_source('a'), 'kind': 'x'}]},
      r"data.train\[0\]: .*kind 'x'",
    ),
  ],
)
def test_impossible_settings(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    settings_lib.build(
      read_data.DataConfig, _settings(tmp_path, **change), 'data'
    )


def test_a_missing_setting_is_named(tmp_path):
  settings = _settings(tmp_path)
  del settings['packing']
  with pytest.raises(ValueError, match='data: missing setting packing'):
    settings_lib.build(read_data.DataConfig, settings, 'data')


def test_rows_made_in_another_way_are_a_difference(tmp_path):
  manifest = _prepare(tmp_path).manifest
  other = json.loads(json.dumps(manifest))
  other['train'][0]['digest'] = 'of another version'
  (line,) = read_data.compare_manifests(other, manifest)
  assert line.endswith('made in another way by this version of the code')


def test_a_missing_validation_file_is_found_before_any_work(tmp_path):
  with pytest.raises(ValueError, match='nowhere'):
    _prepare(tmp_path, validation=[_source(str(tmp_path / 'nowhere*'))])
  assert not list(tmp_path.rglob('*.arrayrecord'))


def test_settings_survive_json(tmp_path):
  config = settings_lib.build(read_data.DataConfig, _settings(tmp_path), 'data')
  as_json = json.loads(json.dumps(dataclasses.asdict(config)))
  assert settings_lib.build(read_data.DataConfig, as_json, 'data') == config


def test_too_little_text(tmp_path):
  message = 'has 80 tokens, but a row of data.sequence_length=80 needs 81'
  with pytest.raises(ValueError, match=message):
    _prepare(tmp_path, sequence_length=80)
  assert len(_take(_prepare(tmp_path, sequence_length=79).train, 3, 8)) == 3
  _prepare(tmp_path, sequence_length=80, packing='pad')


def test_nothing_left_to_validate_on(tmp_path):
  with pytest.raises(ValueError, match='holdout_every is 21, but no training'):
    _prepare(tmp_path, holdout_every=21)
