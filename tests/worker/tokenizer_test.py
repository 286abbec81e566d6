"""Training and loading a tokenizer, and what it promises about text."""

import dataclasses
import errno
import json

import numpy as np
import pytest

from launch.worker import sources
from launch.worker import tokenizer as tokenizer_lib

_CONFIG = tokenizer_lib.TokenizerConfig(
  file='',
  vocab_size=270,
  end_token='<|endoftext|>',
  pad_token='<|pad|>',
  train_bytes=10_000,
)
_TEXTS = [f'the {word} sat on the mat' for word in ('cat', 'dog', 'bird')] * 20


def _file(tmp_path, text):
  path = tmp_path / 'tokenizer.json'
  path.write_text(text)
  return dataclasses.replace(_CONFIG, file=str(path))


@pytest.mark.parametrize(
  'text',
  ['the cat', '', ' \n\t  x', 'é \U0001f600 \x00', 'a<|endoftext|>b', '\r\n'],
)
def test_every_string_decodes_to_itself(text):
  tokenizer = tokenizer_lib.train(_TEXTS, _CONFIG)
  (ids,) = tokenizer.encode_batch([text])
  assert ids.dtype == np.int32
  assert tokenizer.decode(ids) == text
  assert not np.isin(ids, (tokenizer.pad_id, tokenizer.end_id)).any()


def test_training_is_deterministic():
  a, b = (tokenizer_lib.train(iter(_TEXTS), _CONFIG) for _ in range(2))
  assert a.digest == b.digest
  assert (a.vocab_size, a.pad_id, a.end_id) == (270, 0, 1)
  assert len(a.encode_batch(['the cat'])[0]) < len('the cat')
  other = tokenizer_lib.train([*_TEXTS, 'zebra ' * 99], _CONFIG)
  assert other.digest != a.digest


def test_little_text_gives_a_smaller_vocabulary():
  tokenizer = tokenizer_lib.train(['ab'], _CONFIG)
  assert tokenizer.vocab_size == 259


def test_one_token_may_pad_and_end():
  config = dataclasses.replace(_CONFIG, pad_token='<|endoftext|>')
  tokenizer = tokenizer_lib.train(_TEXTS, config)
  assert tokenizer.pad_id == tokenizer.end_id == 0


def test_decoding_leaves_special_tokens_out():
  tokenizer = tokenizer_lib.train(_TEXTS, _CONFIG)
  (ids,) = tokenizer.encode_batch(['cat'])
  assert tokenizer.decode([0, *ids, 1]) == 'cat'


def test_saved_and_loaded_tokenizers_are_equal(tmp_path):
  tokenizer = tokenizer_lib.train(_TEXTS, _CONFIG)
  config = dataclasses.replace(_CONFIG, file=str(tmp_path / 'tokenizer.json'))
  tokenizer.save(config.file)
  loaded = tokenizer_lib.load(config)
  assert loaded.digest == tokenizer.digest
  np.testing.assert_array_equal(
    loaded.encode_batch(['the cat'])[0], tokenizer.encode_batch(['the cat'])[0]
  )


def test_saving_again_writes_nothing_and_a_full_disk_damages_nothing(tmp_path):
  file = tmp_path / 'tokenizer.json'
  (tmp_path / 'tokenizer.json.tmp').symlink_to('/dev/full')
  tokenizer = tokenizer_lib.train(_TEXTS, _CONFIG)
  text = tokenizer._text
  file.write_text(f'{text}\n')
  with pytest.raises(OSError, match='No space left') as raised:
    tokenizer.save(str(file))
  assert raised.value.errno == errno.ENOSPC
  assert file.read_text() == f'{text}\n'
  file.write_text(text)
  tokenizer.save(str(file))


@pytest.mark.parametrize('piece', [1, 5, 100])
def test_encoding_in_pieces_changes_no_token(monkeypatch, piece):
  tokenizer = tokenizer_lib.train(_TEXTS, _CONFIG)
  texts = ["the  cat's\n on\tthe 3 mats é!  \n\n" * 9, '', 'x', 'a b' * 50]
  whole = tokenizer.encode_batch(texts)
  monkeypatch.setattr(tokenizer_lib, '_PIECE_CHARACTERS', piece)
  in_pieces = tokenizer.encode_batch(texts)
  for a, b in zip(whole, in_pieces, strict=True):
    np.testing.assert_array_equal(a, b)


def test_settings_for_fixed_sizes_are_ignored(tmp_path):
  tokenizer = tokenizer_lib.train(_TEXTS, _CONFIG)
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  content = json.loads((tmp_path / 'tokenizer.json').read_text())
  content['truncation'] = {
    'direction': 'Right',
    'max_length': 2,
    'strategy': 'LongestFirst',
    'stride': 0,
  }
  limited = tokenizer_lib.load(_file(tmp_path, json.dumps(content)))
  assert limited.decode(limited.encode_batch(['the cat'])[0]) == 'the cat'


def test_unusable_files(tmp_path):
  with pytest.raises(ValueError, match=r'nope\.json cannot be read: No such'):
    tokenizer_lib.load(dataclasses.replace(_CONFIG, file='/nope.json'))
  with pytest.raises(ValueError, match=r'tokenizer\.json: not a tokenizer'):
    tokenizer_lib.load(_file(tmp_path, '{"a": 1}'))
  text = tmp_path / 'saved.json'
  tokenizer_lib.train(_TEXTS, _CONFIG).save(str(text))
  config = _file(tmp_path, text.read_text())
  message = r"end_token '<\|end\|>' is not in its vocabulary"
  with pytest.raises(ValueError, match=message) as raised:
    tokenizer_lib.load(dataclasses.replace(config, end_token='<|end|>'))
  assert 'special tokens are <|pad|>, <|endoftext|>' in str(raised.value)


def test_vocabulary_without_room_for_bytes():
  config = dataclasses.replace(_CONFIG, vocab_size=257)
  with pytest.raises(ValueError, match=r'vocab_size is 257; .* at least 258'):
    tokenizer_lib.train(_TEXTS, config)


def test_prepare_trains_once_per_content(tmp_path):
  source = sources.Source('text', 1.0, f'{tmp_path}/*.txt', '', '', '')
  (tmp_path / 'a.txt').write_text('the cat sat. ' * 50)
  reports, told = [], []

  def prepare():
    del reports[:]
    return tokenizer_lib.prepare(
      _CONFIG,
      (source,),
      str(tmp_path / 'cache'),
      lambda *args: reports.append(args),
      told.append,
    )

  first = prepare()
  assert reports[-1][1:] == (10_000, 10_000, 'bytes')
  second = prepare()
  assert second.digest == first.digest
  assert not reports
  (tmp_path / 'a.txt').write_text('the dog ran. ' * 50)
  assert prepare().digest != first.digest
  assert reports
  assert not told
