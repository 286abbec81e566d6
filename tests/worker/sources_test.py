"""Reading documents, and one clear line for everything that can be wrong."""

import gzip
import json
import os
import pathlib

import pyarrow
from pyarrow import parquet
import pytest
import tensorflow_datasets as tfds

from launch.worker import sources


def _source(kind, **settings):
  fields = {
    'weight': 1.0,
    'files': '',
    'field': '',
    'directory': '',
    'split': '',
  }
  return sources.Source(kind=kind, **{**fields, **settings})


def _read_all(source):
  return [
    text
    for file in sources.list_files(source)
    for text, _ in sources.read_documents(source, file)
  ]


def _jsonl(path, texts):
  lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  if path.suffix == '.gz':
    path.write_bytes(gzip.compress(lines.encode()))
  else:
    path.write_text(lines)
  return _source('jsonl', files=str(path), field='text')


def _parquet(path, columns):
  parquet.write_table(pyarrow.table(columns), path)
  return _source('parquet', files=str(path), field='text')


@pytest.fixture(name='tfds_directory', scope='module')
def _tfds_directory(tmp_path_factory):
  root = tmp_path_factory.mktemp('tfds')

  class Toy(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')
    pkg_dir_path = root

    def _info(self):
      features = {
        'text': tfds.features.Text(),
        'label': tfds.features.ClassLabel(num_classes=3),
      }
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict(features)
      )

    def _split_generators(self, dl_manager):
      return {
        'train': self._generate_examples('train', 7),
        'test': self._generate_examples('test', 2),
      }

    def _generate_examples(self, name, count):
      for i in range(count):
        yield i, {'text': f'{name} {i} é', 'label': i % 3}

  builder = Toy(data_dir=str(root), file_format='array_record')
  builder.download_and_prepare()
  return str(builder.data_path)


def test_text_files_are_documents_in_the_order_of_their_names(tmp_path):
  for name in ('b.txt', 'sub/a.txt', 'a.txt', 'c.md'):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'{name} é\r\n')
  source = _source('text', files=f'{tmp_path}/**/*.txt')
  files = sources.list_files(source)
  assert [file.name for file in files] == ['a.txt', 'b.txt', 'sub/a.txt']
  assert _read_all(source) == ['a.txt é\r\n', 'b.txt é\r\n', 'sub/a.txt é\r\n']


def test_names_do_not_depend_on_where_the_corpus_lies(tmp_path):
  names = []
  for place in ('one', 'two'):
    (tmp_path / place / 'part0').mkdir(parents=True)
    (tmp_path / place / 'part0' / 'a.txt').write_text('a')
    source = _source('text', files=f'{tmp_path}/{place}/part*/*.txt')
    names.append([file.name for file in sources.list_files(source)])
  assert names == [['part0/a.txt']] * 2


def test_home_and_relative_paths(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_text('a')
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  for files in ('~/a.txt', 'a.txt', '*.txt'):
    assert _read_all(_source('text', files=files)) == ['a']


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.json.gz'])
def test_json_lines(tmp_path, name):
  texts = ['one', 'line\nbreak', '', '\U0001f600']
  source = _jsonl(tmp_path / name, texts)
  assert _read_all(source) == texts
  (file,) = sources.list_files(source)
  read = [position for _, position in sources.read_documents(source, file)]
  assert read == sorted(read)
  assert 0 < read[-1] <= file.num_bytes


def test_blank_lines_are_not_documents(tmp_path):
  (tmp_path / 'a.jsonl').write_text('\n{"text": "a"}\n\n{"text": "b"}')
  source = _source('jsonl', files=f'{tmp_path}/a.jsonl', field='text')
  assert _read_all(source) == ['a', 'b']


def test_parquet(tmp_path):
  texts = [f'row {i}' for i in range(3000)]
  source = _parquet(tmp_path / 'a.parquet', {'text': texts, 'n': [1] * 3000})
  assert _read_all(source) == texts
  (file,) = sources.list_files(source)
  *_, (_, read) = sources.read_documents(source, file)
  assert read == file.num_bytes


def test_tfds(tfds_directory):
  for split, count in (('train', 7), ('test', 2)):
    source = _source(
      'tfds', directory=tfds_directory, split=split, field='text'
    )
    expected = [f'{split} {i} é' for i in range(count)]
    assert sorted(_read_all(source)) == expected


def test_stdlib_has_modules_and_neither_packages_nor_tests():
  source = _source('stdlib')
  files = sources.list_files(source)
  names = [file.name for file in files]
  assert {'os.py', 'json/decoder.py'} <= set(names)
  parts = {part for name in names for part in pathlib.Path(name).parts}
  assert not parts & {'site-packages', 'test', '__pycache__', 'idlelib'}
  assert names == sorted(names)
  (text, read), *rest = sources.read_documents(
    source, files[names.index('os.py')]
  )
  assert 'def makedirs' in text
  assert read == os.path.getsize(os.__file__)
  assert not rest


def test_stdlib_files_in_other_encodings_are_empty_documents(tmp_path):
  path = tmp_path / 'a.py'
  path.write_bytes(b'\xff')
  file = sources.File(str(path), 'a.py', 1)
  assert list(sources.read_documents(_source('stdlib'), file)) == [('', 1)]


def test_a_sample_is_shared_by_weight_and_reaches_every_file(tmp_path):
  for name, letter in (('x', 'x'), ('y', 'y')):
    for number in range(5):
      _jsonl(tmp_path / f'{name}{number}.jsonl', [letter * 100] * 100)
  mixture = [
    _source('jsonl', files=f'{tmp_path}/x*', field='text', weight=3.0),
    _source('jsonl', files=f'{tmp_path}/y*', field='text', weight=1.0),
  ]
  sample = ''.join(sources.sample(mixture, 4000))
  assert (sample.count('x'), sample.count('y')) == (3000, 1000)
  assert list(sources.sample(mixture, 4000)) == list(
    sources.sample(mixture, 4000)
  )
  whole = ''.join(sources.sample(mixture[:1], 10**9))
  assert whole.count('x') == 5 * 100 * 100


def test_a_small_sample_comes_from_all_over_the_files(tmp_path):
  for number in range(100):
    (tmp_path / f'{number:02d}').write_text(f'{number:02d}')
  source = _source('text', files=f'{tmp_path}/*')
  numbers = [int(text) for text in sources.sample([source], 40)]
  assert len(set(numbers)) == 20
  assert min(numbers) < 25
  assert max(numbers) > 75


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'kind': 'csv'}, "kind 'csv' is unknown; use one of text, jsonl"),
    ({'kind': 'text'}, 'a text source needs `files`'),
    ({'kind': 'jsonl', 'files': 'a'}, 'needs `field`'),
    ({'kind': 'text', 'files': 'a', 'field': 'b'}, 'does not read `field`'),
    ({'kind': 'stdlib', 'files': 'a'}, 'does not read `files`'),
    ({'kind': 'tfds', 'directory': 'a', 'field': 'b'}, 'needs `split`'),
    ({'kind': 'stdlib', 'weight': 0.0}, 'Weight 0.0'),
    ({'kind': 'stdlib', 'weight': float('nan')}, 'Weight nan'),
  ],
)
def test_impossible_sources(settings, message):
  with pytest.raises(ValueError, match=f'(?i){message}'):
    _source(**settings)


def test_nothing_matches(tmp_path):
  with pytest.raises(ValueError, match=r'nope\*\.txt matches no file'):
    _read_all(_source('text', files=f'{tmp_path}/nope*.txt'))
  with pytest.raises(ValueError, match='is a directory; name its files'):
    _read_all(_source('text', files=str(tmp_path)))


def test_permission_denied(tmp_path, monkeypatch):
  source = _jsonl(tmp_path / 'a.jsonl', ['a'])

  def refuse(*_):
    raise PermissionError(13, 'Permission denied')

  monkeypatch.setattr('builtins.open', refuse)
  with pytest.raises(ValueError, match=r'a\.jsonl cannot be read: permission'):
    _read_all(source)


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"text": ', r'a\.jsonl line 2 is not JSON'),
    ('[1]', 'line 2 is a JSON list, not an object'),
    ('{"body": "b", "id": 1}', "line 2 has no field 'text'; it has body, id"),
    ('{"text": 3}', "line 2: field 'text' holds int, not a string"),
    ('{"text": null}', 'holds NoneType'),
    (r'{"text": "\ud800"}', 'line 2: .* lone surrogate'),
  ],
)
def test_broken_lines(tmp_path, line, message):
  (tmp_path / 'a.jsonl').write_text(f'{{"text": "a"}}\n{line}\n')
  with pytest.raises(ValueError, match=message):
    _read_all(_source('jsonl', files=f'{tmp_path}/a.jsonl', field='text'))


def test_escaped_pairs_are_characters(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "\\ud83d\\ude00"}\n')
  source = _source('jsonl', files=f'{tmp_path}/a.jsonl', field='text')
  assert _read_all(source) == ['\U0001f600']


@pytest.mark.parametrize('damage', ['cut', 'plain', 'flipped'])
def test_broken_gzip(tmp_path, damage):
  path = tmp_path / 'a.jsonl.gz'
  source = _jsonl(path, [f'text {i * i}' for i in range(200)])
  raw = bytearray(path.read_bytes())
  if damage == 'flipped':
    raw[len(raw) // 2] ^= 255
  broken = {'cut': raw[:-20], 'plain': b'{}', 'flipped': raw}[damage]
  path.write_bytes(broken)
  with pytest.raises(ValueError, match=r'a\.jsonl\.gz (is broken gzip|line)'):
    _read_all(source)


def test_text_must_be_utf8(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'ab\xff')
  with pytest.raises(ValueError, match=r'a\.txt is not UTF-8 \(byte 2\)'):
    _read_all(_source('text', files=f'{tmp_path}/a.txt'))


def test_unsuitable_parquet(tmp_path):
  path = tmp_path / 'a.parquet'
  with pytest.raises(ValueError, match="no field 'text'; it has body, n"):
    _read_all(_parquet(path, {'n': [1], 'body': ['a']}))
  with pytest.raises(ValueError, match="column 'text' holds int64"):
    _read_all(_parquet(path, {'text': [1]}))
  with pytest.raises(ValueError, match="row 2: column 'text' is null"):
    _read_all(_parquet(path, {'text': ['a', None]}))
  path.write_text('not parquet')
  with pytest.raises(ValueError, match=r'a\.parquet is not Parquet'):
    _read_all(_source('parquet', files=str(path), field='text'))


def test_unsuitable_tfds(tfds_directory, tmp_path):
  with pytest.raises(ValueError, match='no prepared TFDS dataset'):
    _read_all(
      _source('tfds', directory=str(tmp_path), split='train', field='text')
    )
  directory = {'directory': tfds_directory}
  with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
    _read_all(_source('tfds', **directory, split='dev', field='text'))
  with pytest.raises(ValueError, match="no field 'body'; it has label, text"):
    _read_all(_source('tfds', **directory, split='train', field='body'))
  with pytest.raises(ValueError, match=r"field 'label' holds .*, not text"):
    _read_all(_source('tfds', **directory, split='train', field='label'))
