"""Laws of packing, padding and shifting."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import batch


def _unique_documents(seed):
  """Documents of 1 to 30 tokens in which no token occurs twice."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, 31, size=rng.integers(1, 40))
  ends = np.cumsum(lengths)
  tokens = np.arange(1, ends[-1] + 1)
  return np.split(tokens, ends[:-1])


def _pairs(documents):
  """Every (token, next token) within a document."""
  return [
    (int(a), int(b))
    for document in documents
    for a, b in itertools.pairwise(document)
  ]


def _stack(rows):
  tokens, segment_ids = zip(*rows, strict=True)
  return np.stack(tokens), np.stack(segment_ids)


def test_shift_example():
  got = batch.shift(
    np.array([[5, 6, 7, 8, 9, 0]]), np.array([[1, 1, 1, 2, 2, 0]])
  )
  np.testing.assert_array_equal(got.tokens, [[5, 6, 7, 8, 9]])
  np.testing.assert_array_equal(got.targets, [[6, 7, 0, 9, 0]])
  np.testing.assert_array_equal(got.segment_ids, [[1, 1, 1, 2, 2]])
  np.testing.assert_array_equal(got.positions, [[0, 1, 2, 0, 1]])
  np.testing.assert_array_equal(got.weights, [[1, 1, 0, 1, 0]])


def test_pack_example():
  tokens, segment_ids = _stack(batch.pack([[5, 6, 7], [8, 9]], length=3))
  np.testing.assert_array_equal(tokens, [[5, 6, 7, 8], [8, 9, 0, 0]])
  np.testing.assert_array_equal(segment_ids, [[1, 1, 1, 2], [1, 1, 0, 0]])


def test_pad_example():
  tokens, segment_ids = batch.pad([5, 6, 7], length=4, pad_id=3)
  np.testing.assert_array_equal(tokens, [5, 6, 7, 3, 3])
  np.testing.assert_array_equal(segment_ids, [1, 1, 1, 0, 0])
  tokens, segment_ids = batch.pad([5, 6, 7], length=1, pad_id=3)
  np.testing.assert_array_equal(tokens, [5, 6])
  np.testing.assert_array_equal(segment_ids, [1, 1])


@pytest.mark.parametrize('length', [1, 2, 7, 64])
@pytest.mark.parametrize('seed', range(5))
def test_packing_predicts_each_token_once_from_its_own_document(seed, length):
  documents = _unique_documents(seed)
  pairs = _pairs(documents)
  got = batch.shift(*_stack(batch.pack(documents, length)))
  counts = got.weights == 1
  seen = zip(got.tokens[counts], got.targets[counts], strict=True)
  assert sorted((int(a), int(b)) for a, b in seen) == sorted(pairs)
  assert np.all(np.isin(got.weights, (0, 1)))
  assert np.all(got.targets[~counts] == 0)


@pytest.mark.parametrize('seed', range(5))
def test_packed_rows_overlap_by_one_token_and_number_their_segments(seed):
  documents = [np.append(d, 0) for d in _unique_documents(seed)]
  tokens, segment_ids = _stack(batch.pack(documents, 16))
  np.testing.assert_array_equal(tokens[:-1, -1], tokens[1:, 0])
  stream = np.concatenate([tokens[:, :-1].ravel(), tokens[-1:, -1]])
  expected = np.concatenate(documents)
  np.testing.assert_array_equal(stream[: len(expected)], expected)
  assert np.all(segment_ids[:, 0] == 1)
  steps = np.diff(segment_ids, axis=1)
  is_padding = segment_ids[:, 1:] == 0
  assert np.all(np.isin(steps[~is_padding], (0, 1)))
  assert not is_padding[:-1].any()


@pytest.mark.parametrize('seed', range(3))
def test_positions_count_from_the_start_of_each_segment(seed):
  documents = _unique_documents(seed)
  got = batch.shift(*_stack(batch.pack(documents, 16)))
  for segment_ids, positions in zip(
    got.segment_ids, got.positions, strict=True
  ):
    for segment in set(segment_ids):
      inside = positions[segment_ids == segment]
      np.testing.assert_array_equal(inside, np.arange(len(inside)))


def test_rows_without_a_target_are_left_out():
  assert list(batch.pack([[5], [6], [7]], length=2)) == []
  assert list(batch.pack([], length=2)) == []
  assert list(batch.pack([[5]], length=2)) == []


def test_empty_documents_leave_no_trace():
  with_empty = _stack(batch.pack([[], [5, 6], [], [7, 8], []], length=3))
  without = _stack(batch.pack([[5, 6], [7, 8]], length=3))
  np.testing.assert_array_equal(with_empty, without)


def test_padding_neither_predicts_nor_is_predicted():
  got = batch.shift(*batch.pad([5, 6, 7], length=6, pad_id=9))
  np.testing.assert_array_equal(got.weights, [1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize('seed', range(2))
def test_jax_and_numpy_agree(seed):
  rows = _stack(batch.pack(_unique_documents(seed), 8))
  expected = batch.shift(*rows)
  got = jax.jit(batch.shift)(*map(jnp.asarray, rows))
  for name, a, b in zip(batch.Batch._fields, expected, got, strict=True):
    assert isinstance(b, jax.Array)
    assert a.dtype == b.dtype, name
    np.testing.assert_array_equal(a, b, err_msg=name)


def test_shift_takes_any_number_of_leading_axes():
  tokens, segment_ids = _stack(batch.pack(_unique_documents(0), 8))
  whole = batch.shift(tokens, segment_ids)
  row = batch.shift(tokens[1], segment_ids[1])
  for a, b in zip(whole, row, strict=True):
    np.testing.assert_array_equal(a[1], b)


def test_errors():
  with pytest.raises(ValueError, match='length is 0'):
    next(batch.pack([[1, 2]], 0))
  with pytest.raises(ValueError, match='length is 0'):
    batch.pad([1, 2], 0, 0)
  with pytest.raises(ValueError, match=r'\(1,\) and segment_ids \(1,\)'):
    batch.shift(np.zeros(1, int), np.zeros(1, int))
  with pytest.raises(ValueError, match='one shape'):
    batch.shift(np.zeros((1, 3), int), np.zeros((1, 2), int))
