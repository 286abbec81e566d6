"""A cache holds what its source holds, whatever happens while it is made."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxllm import batch
from launch.worker import rows
from launch.worker import sources
from launch.worker import token_cache
from launch.worker import tokenizer as tokenizer_lib

_ROOT = pathlib.Path(__file__).parents[2]
_LENGTH = 16
_TRAINING_TEXT = ['the number one two three '] * 20
_PACK = token_cache.Layout('pack', _LENGTH, 0)


@pytest.fixture(name='tokenizer', scope='module')
def _tokenizer():
  config = tokenizer_lib.TokenizerConfig('', 300, '<|end|>', '<|pad|>', 1000)
  return tokenizer_lib.train(_TRAINING_TEXT, config)


@pytest.fixture(name='source')
def _source(tmp_path):
  """Two files of 30 and 10 documents, one of them empty."""
  directory = tmp_path / 'corpus'
  directory.mkdir()
  for name, count in (('a', 30), ('b', 10)):
    lines = [
      f'{{"text": "{name} document number {i} {"x" * i}"}}'
      for i in range(count)
    ]
    lines[5] = '{"text": ""}' if name == 'b' else lines[5]
    (directory / f'{name}.jsonl').write_text('\n'.join(lines))
  return sources.Source('jsonl', 1.0, f'{directory}/*', 'text', '', '')


def _prepare(
  source, tokenizer, cache_dir, layout=_PACK, report=None, tell=None
):
  return token_cache.prepare(
    source,
    tokenizer,
    layout,
    str(cache_dir),
    report or (lambda *_: None),
    tell or (lambda line: pytest.fail(f'unexpected: {line}')),
  )


def _rows(cache_dir, manifest, part, pad_id=0):
  stored = rows.Rows(str(cache_dir), manifest, part, pad_id)
  return [
    tuple(array.tolist() for array in stored[i]) for i in range(len(stored))
  ]


def _documents(source, tokenizer):
  texts = [
    text
    for file in sources.list_files(source)
    for text, _ in sources.read_documents(source, file)
    if text
  ]
  encoded = tokenizer.encode_batch(texts)
  return [np.append(tokens, tokenizer.end_id) for tokens in encoded]


def _as_lists(packed):
  return [tuple(array.tolist() for array in row) for row in packed]


def test_packed_rows_are_the_documents_of_the_source(
  tmp_path, source, tokenizer
):
  manifest = _prepare(source, tokenizer, tmp_path)
  documents = _documents(source, tokenizer)
  expected = _as_lists(batch.pack(documents, _LENGTH))
  assert _rows(tmp_path, manifest, token_cache.KEPT) == expected
  assert _rows(tmp_path, manifest, token_cache.HELD_OUT) == []
  (shard,) = manifest['shards']
  assert shard['documents'] == 39
  assert shard['skipped'] == 1
  assert shard['tokens'] == sum(map(len, documents))


def test_padded_rows_hold_a_document_each(tmp_path, source, tokenizer):
  layout = token_cache.Layout('pad', _LENGTH, 0)
  manifest = _prepare(source, tokenizer, tmp_path, layout)
  documents = _documents(source, tokenizer)
  expected = _as_lists(batch.pad(d, _LENGTH, 9) for d in documents)
  assert _rows(tmp_path, manifest, token_cache.KEPT, pad_id=9) == expected
  too_long = sum(len(d) > _LENGTH + 1 for d in documents)
  assert manifest['shards'][0]['truncated'] == too_long > 0


@pytest.mark.parametrize('shard_bytes', [200, 1 << 20])
def test_every_nth_document_is_held_out(
  tmp_path, source, tokenizer, monkeypatch, shard_bytes
):
  monkeypatch.setattr(token_cache, 'SHARD_BYTES', shard_bytes)
  layout = token_cache.Layout('pad', 99, 4)
  manifest = _prepare(source, tokenizer, tmp_path, layout)
  documents = _as_lists(
    batch.pad(d, 99, 0) for d in _documents(source, tokenizer)
  )
  held_out = documents[3::4]
  assert _rows(tmp_path, manifest, token_cache.HELD_OUT) == held_out
  kept = [d for i, d in enumerate(documents) if i % 4 != 3]
  assert _rows(tmp_path, manifest, token_cache.KEPT) == kept


def test_shards_begin_where_the_last_ended(
  tmp_path, source, tokenizer, monkeypatch
):
  monkeypatch.setattr(token_cache, 'SHARD_BYTES', 200)
  manifest = _prepare(source, tokenizer, tmp_path)
  assert len(manifest['shards']) > 4
  documents = iter(_documents(source, tokenizer))
  expected = []
  for shard in manifest['shards']:
    share = [next(documents) for _ in range(shard['documents'])]
    expected += _as_lists(batch.pack(share, _LENGTH))
  assert next(documents, None) is None
  assert _rows(tmp_path, manifest, token_cache.KEPT) == expected


def test_a_second_run_writes_nothing(tmp_path, source, tokenizer):
  reports = []
  first = _prepare(
    source, tokenizer, tmp_path, report=lambda *a: reports.append(a)
  )
  total = sum(file.num_bytes for file in sources.list_files(source))
  assert reports[-1] == (
    f'Tokenising {sources.describe(source)}',
    total,
    total,
    'bytes',
  )
  second = _prepare(
    source, tokenizer, tmp_path, report=lambda *_: pytest.fail('wrote again')
  )
  assert second == first


def test_a_finished_cache_needs_no_lock(
  tmp_path, source, tokenizer, monkeypatch
):
  first = _prepare(source, tokenizer, tmp_path)

  def refuse(*_):
    raise AssertionError('locked a directory that may be read-only')

  monkeypatch.setattr(token_cache.durable, 'locked', refuse)
  assert _prepare(source, tokenizer, tmp_path) == first


def test_all_that_decides_the_rows_names_the_cache(tmp_path, source, tokenizer):
  # Another tokenizer with a vocabulary of the same size.
  config = tokenizer_lib.TokenizerConfig('', 300, '<|pad|>', '<|end|>', 1000)
  other = tokenizer_lib.train(_TRAINING_TEXT, config)
  assert other.vocab_size == tokenizer.vocab_size
  moved = tmp_path / 'elsewhere'
  shutil.copytree(pathlib.Path(source.files).parent, moved)
  at_other_place = sources.Source(
    'jsonl', 2.0, f'{moved}/*.jsonl', 'text', '', ''
  )
  digests = [
    _prepare(source, tokenizer, tmp_path)['digest'],
    _prepare(source, other, tmp_path)['digest'],
    _prepare(
      source, tokenizer, tmp_path, token_cache.Layout('pad', _LENGTH, 0)
    )['digest'],
    _prepare(source, tokenizer, tmp_path, token_cache.Layout('pack', 8, 0))[
      'digest'
    ],
    _prepare(
      source, tokenizer, tmp_path, token_cache.Layout('pack', _LENGTH, 3)
    )['digest'],
  ]
  same = _prepare(at_other_place, tokenizer, tmp_path)['digest']
  assert same == digests[0]
  file = moved / 'a.jsonl'
  file.write_text(file.read_text().replace('number 3', 'number 9'))
  digests.append(_prepare(at_other_place, tokenizer, tmp_path)['digest'])
  assert len(set(digests)) == len(digests)


def _child(source, tokenizer, tmp_path, report):
  """Starts a process that prepares the source with a given `report`."""
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  code = f"""
    import os, sys, time
    from launch.worker import sources, token_cache, tokenizer
    token_cache.SHARD_BYTES = 200
    def report(name, done, total, unit):
      {report}
    config = tokenizer.TokenizerConfig(
      {str(tmp_path / 'tokenizer.json')!r}, 300, '<|end|>', '<|pad|>', 1000)
    token_cache.prepare(
      sources.{source!r}, tokenizer.load(config),
      token_cache.Layout('pack', {_LENGTH}, 0), {str(tmp_path / 'cache')!r},
      report, print)
  """
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(code)], cwd=_ROOT
  )


def _wait_for(path, process):
  deadline = time.monotonic() + 60
  while not path.exists():
    assert process.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_a_killed_preparation_goes_on_where_it_stopped(
  tmp_path, source, tokenizer, monkeypatch
):
  monkeypatch.setattr(token_cache, 'SHARD_BYTES', 200)
  undisturbed = _prepare(source, tokenizer, tmp_path / 'undisturbed')
  directory = tmp_path / 'cache' / undisturbed['digest']
  third = directory / '00003-kept.array_record.tmp'
  child = _child(
    source,
    tokenizer,
    tmp_path,
    f'if os.path.exists({str(third)!r}): time.sleep(100)',
  )
  try:
    _wait_for(third, child)
    time.sleep(0.1)
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait()
  assert not (directory / 'manifest.json').exists()
  finished = {file: file.stat().st_ino for file in directory.glob('0*.json')}
  assert len(finished) == 3
  manifest = _prepare(source, tokenizer, tmp_path / 'cache')
  assert {file: file.stat().st_ino for file in finished} == finished
  for part in (token_cache.KEPT, token_cache.HELD_OUT):
    assert _rows(tmp_path / 'cache', manifest, part) == _rows(
      tmp_path / 'undisturbed', undisturbed, part
    )
  assert not list(directory.glob('*.tmp'))


def test_of_two_runs_one_waits_and_says_so(
  tmp_path, source, tokenizer, monkeypatch
):
  monkeypatch.setattr(token_cache, 'SHARD_BYTES', 200)
  begun, go_on = tmp_path / 'begun', tmp_path / 'go_on'
  child = _child(
    source,
    tokenizer,
    tmp_path,
    f"""open({str(begun)!r}, 'w').close()
      while not os.path.exists({str(go_on)!r}): time.sleep(0.02)""",
  )
  told = []

  def tell(line):
    told.append(line)
    go_on.touch()

  try:
    _wait_for(begun, child)
    _prepare(
      source,
      tokenizer,
      tmp_path / 'cache',
      report=lambda *_: pytest.fail('wrote what another run writes'),
      tell=tell,
    )
  finally:
    go_on.touch()
    assert child.wait(60) == 0
  (line,) = told
  assert 'waiting' in line


@pytest.mark.parametrize('damage', ['cut', 'missing', 'no shard json'])
def test_a_damaged_cache_is_repaired(
  tmp_path, source, tokenizer, monkeypatch, damage
):
  monkeypatch.setattr(token_cache, 'SHARD_BYTES', 200)
  manifest = _prepare(source, tokenizer, tmp_path)
  before = _rows(tmp_path, manifest, token_cache.KEPT)
  directory = tmp_path / manifest['digest']
  file = directory / '00001-kept.array_record'
  others = directory / '00002-kept.array_record'
  untouched = others.stat().st_ino
  if damage == 'cut':
    os.truncate(file, file.stat().st_size // 2)
  else:
    file.unlink()
  if damage == 'no shard json':
    (directory / '00001.json').unlink()
  told = []
  repaired = _prepare(source, tokenizer, tmp_path, tell=told.append)
  assert repaired == manifest
  assert _rows(tmp_path, repaired, token_cache.KEPT) == before
  assert others.stat().st_ino == untouched
  (line,) = told
  assert '00001-kept' in line


def test_a_full_disk_leaves_finished_shards_and_no_manifest(
  tmp_path, source, tokenizer, monkeypatch
):
  monkeypatch.setattr(token_cache, 'SHARD_BYTES', 200)
  expected = _prepare(source, tokenizer, tmp_path / 'undisturbed')
  directory = tmp_path / 'cache' / expected['digest']
  directory.mkdir(parents=True)
  (directory / '00002-kept.array_record.tmp').symlink_to('/dev/full')
  with pytest.raises(OSError, match='No space left') as raised:
    _prepare(source, tokenizer, tmp_path / 'cache')
  assert raised.value.errno == errno.ENOSPC
  assert (directory / '00001.json').exists()
  assert not (directory / 'manifest.json').exists()
  assert _prepare(source, tokenizer, tmp_path / 'cache') == expected


def test_a_source_that_changes_while_it_is_read(tmp_path, source, tokenizer):
  file = pathlib.Path(source.files).parent / 'b.jsonl'

  def append(*_):
    with open(file, 'a') as stream:
      stream.write('\n{"text": "more"}')

  with pytest.raises(ValueError, match='changed while they were read'):
    _prepare(source, tokenizer, tmp_path / 'cache', report=append)
  manifest = _prepare(source, tokenizer, tmp_path / 'cache')
  assert manifest['shards'][0]['documents'] == 40


def test_an_empty_corpus(tmp_path, tokenizer):
  (tmp_path / 'a.jsonl').write_text('{"text": ""}\n')
  source = sources.Source('jsonl', 1.0, f'{tmp_path}/a.jsonl', 'text', '', '')
  for _ in range(2):
    with pytest.raises(ValueError, match=r'a\.jsonl holds no text'):
      _prepare(source, tokenizer, tmp_path / 'cache')


def test_an_unwritable_cache_directory(tmp_path, source, tokenizer):
  (tmp_path / 'file').write_text('in the way')
  with pytest.raises(ValueError, match=r'data\.cache_dir .*file cannot be'):
    _prepare(source, tokenizer, tmp_path / 'file')
