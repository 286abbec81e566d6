"""Rows come back as they were written, or an error says why not."""

import errno

import numpy as np
import pytest

from jaxllm import batch
from launch.worker import rows


@pytest.mark.parametrize('vocab_size', [300, 1 << 16, (1 << 16) + 1])
def test_rows_survive_the_encoding(vocab_size):
  dtype = rows.token_dtype(vocab_size)
  rng = np.random.default_rng(0)
  documents = [rng.integers(0, vocab_size, n) for n in (2, 9, 1, 40, 3)]
  documents[1][0] = vocab_size - 1
  for tokens, segment_ids in batch.pack(documents, 12):
    record = rows.encode(tokens, segment_ids, dtype)
    got_tokens, got_segment_ids = rows.decode(record, 12, 7, dtype)
    np.testing.assert_array_equal(got_segment_ids, segment_ids)
    np.testing.assert_array_equal(
      got_tokens, np.where(segment_ids == 0, 7, tokens)
    )
    assert got_tokens.dtype == got_segment_ids.dtype == np.int32


def test_encoding_example():
  record = rows.encode(
    np.array([5, 6, 7, 8, 0]), np.array([1, 1, 1, 2, 0]), '<u2'
  )
  expected = np.array([2, 3, 1], '<u4').tobytes()
  assert record == expected + np.array([5, 6, 7, 8], '<u2').tobytes()


def test_no_records_write_no_file(tmp_path):
  written = rows.write(str(tmp_path / 'a'), iter(()))
  assert written == {'name': 'a', 'rows': 0, 'bytes': 0}
  assert not list(tmp_path.iterdir())


def test_a_full_disk_is_reported_as_such_and_leaves_no_file(tmp_path):
  (tmp_path / 'a.tmp').symlink_to('/dev/full')
  with pytest.raises(OSError, match='No space left') as raised:
    rows.write(str(tmp_path / 'a'), iter([b'x' * 100_000] * 3))
  assert raised.value.errno == errno.ENOSPC
  assert not list(tmp_path.iterdir())


def test_an_error_in_the_records_leaves_no_file(tmp_path):
  def records():
    yield b'x'
    raise ValueError('bad line')

  with pytest.raises(ValueError, match='bad line'):
    rows.write(str(tmp_path / 'a'), records())
  assert not list(tmp_path.iterdir())
