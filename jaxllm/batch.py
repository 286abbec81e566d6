"""What a training step reads, and how token rows become it.

A row holds `length + 1` tokens, so that `length` inputs each have a next token
to predict. Segment ids say which document a token belongs to: 1, 2, ... in
order within the row, 0 for padding. Attention stays inside a segment, positions
restart in each, and a target counts only where it continues its input's
document.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
  """Inputs and targets of one step.

  Attributes:
    tokens: inputs, int32 `[B, L]`.
    targets: the token after each input, int32 `[B, L]`; 0 where weights are 0.
    segment_ids: the document of each input, int32 `[B, L]`; 0 is padding.
    positions: index of each input within its segment, int32 `[B, L]`.
    weights: 1 where the target counts, 0 elsewhere, float32 `[B, L]`.
  """

  tokens: Array
  targets: Array
  segment_ids: Array
  positions: Array
  weights: Array


def shift(tokens: Array, segment_ids: Array) -> Batch:
  """Splits rows into inputs and the targets one token to their right.

  Two documents, `5 6 7` and `8 9`, and one token of padding:

      tokens       5 6 7 8 9 0   ->  tokens       5 6 7 8 9
      segment_ids  1 1 1 2 2 0       targets      6 7 0 9 0
                                     segment_ids  1 1 1 2 2
                                     positions    0 1 2 0 1
                                     weights      1 1 0 1 0

  Args:
    tokens: integers `[..., L + 1]`, numpy or jax.
    segment_ids: integers `[..., L + 1]`; equal ids stand side by side.

  Returns:
    A `Batch` of `[..., L]` arrays of the same library as `tokens`.

  Raises:
    ValueError: the shapes differ or leave no input.
  """
  if tokens.shape != segment_ids.shape or tokens.shape[-1] < 2:
    raise ValueError(
      f'tokens {tokens.shape} and segment_ids {segment_ids.shape} must have '
      'one shape [..., L + 1] with L >= 1.'
    )
  xp = tokens.__array_namespace__()
  inputs, following = segment_ids[..., :-1], segment_ids[..., 1:]
  counts = (inputs == following) & (following != 0)
  return Batch(
    tokens=tokens[..., :-1].astype(xp.int32),
    targets=xp.where(counts, tokens[..., 1:], 0).astype(xp.int32),
    segment_ids=inputs.astype(xp.int32),
    positions=_positions(xp, inputs),
    weights=counts.astype(xp.float32),
  )


def pack(
  documents: Iterable[Sequence[int] | np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Lays documents end to end and cuts the stream into rows.

  Consecutive rows overlap by one token (the last target of one is the first
  input of the next), so every token but a document's first is a target exactly
  once. `pack([[5, 6, 7], [8, 9]], length=3)`:

      tokens       5 6 7 8    8 9 0 0
      segment_ids  1 1 1 2    1 1 0 0

  The last row is padded. A row without any target (it could hold only last
  and first tokens of documents) is left out.

  Args:
    documents: token sequences; empty ones are passed over.
    length: inputs per row, L.

  Yields:
    `(tokens [L + 1], segment_ids [L + 1])`, int32; padding is token 0 in
    segment 0.

  Raises:
    ValueError: `length` is less than 1.
  """
  _check_length(length)
  tokens = np.zeros(length + 1, np.int32)
  segment_ids = np.zeros(length + 1, np.int32)
  filled = segment = 0
  for document in documents:
    taken, size = 0, len(document)
    segment += size > 0
    while taken < size:
      count = min(length + 1 - filled, size - taken)
      tokens[filled : filled + count] = document[taken : taken + count]
      segment_ids[filled : filled + count] = segment
      filled, taken = filled + count, taken + count
      if filled == length + 1:
        if _has_target(segment_ids):
          yield tokens.copy(), segment_ids.copy()
        tokens[0], segment_ids[0] = tokens[-1], 1
        filled = segment = 1
  tokens[filled:] = segment_ids[filled:] = 0
  if _has_target(segment_ids):
    yield tokens, segment_ids


def pad(
  document: Sequence[int] | np.ndarray, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Makes one row of one document, cut or padded to size.

  `pad([5, 6, 7], length=4, pad_id=0)` and `pad([5, 6, 7], length=1, pad_id=0)`:

      tokens       5 6 7 0 0    5 6
      segment_ids  1 1 1 0 0    1 1

  Args:
    document: tokens; those after the first `length + 1` are dropped.
    length: inputs per row, L.
    pad_id: token that fills the rest.

  Returns:
    `(tokens [L + 1], segment_ids [L + 1])`, int32.

  Raises:
    ValueError: `length` is less than 1.
  """
  _check_length(length)
  size = min(len(document), length + 1)
  tokens = np.full(length + 1, pad_id, np.int32)
  tokens[:size] = document[:size]
  return tokens, (np.arange(length + 1) < size).astype(np.int32)


def _positions(xp, segment_ids):
  """Index within the segment: `1 1 1 2 2 0` -> `0 1 2 0 1 0`."""
  index = xp.arange(segment_ids.shape[-1], dtype=xp.int32)
  index = xp.broadcast_to(index, segment_ids.shape)
  begins = segment_ids[..., 1:] != segment_ids[..., :-1]
  start = xp.where(begins, index[..., 1:], 0)
  start = xp.concat([xp.zeros_like(index[..., :1]), start], axis=-1)
  return index - xp.maximum.accumulate(start, axis=-1)


def _has_target(segment_ids: np.ndarray) -> bool:
  same = segment_ids[1:] == segment_ids[:-1]
  return bool(np.any(same & (segment_ids[1:] != 0)))


def _check_length(length: int) -> None:
  if length < 1:
    raise ValueError(f'length is {length}; a row needs at least 1 input.')
