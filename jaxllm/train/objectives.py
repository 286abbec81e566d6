"""Losses as (sum, weight), so that microbatches and devices add up exactly.

Shapes: B batch, L length, D hidden size, V vocabulary, C tokens per chunk.
"""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from jaxllm import batch as batch_lib
from jaxllm.model import decoder


class Loss(NamedTuple):
  """A loss before its one division.

  Attributes:
    sum: weighted sum of per-token losses, nats, float32 scalar.
    weight: sum of the weights, float32 scalar.
  """

  sum: Array
  weight: Array


def cross_entropy(
  hidden: Array,
  unembedding: Array,
  targets: Array,
  weights: Array,
  chunk_tokens: int,
) -> Loss:
  """Weighted cross-entropy of next tokens, a chunk of tokens at a time.

  The logits of one chunk, `[B, C / B, V]` float32, are the largest array that
  exists; the backward pass computes them again. (131k tokens x 32k words at
  once would take 17 GB.) A chunk holds some places of every row, so that rows
  shared out over devices stay there. One that holds all is computed once.

  Args:
    hidden: `[B, L, D]`, what the head reads.
    unembedding: `[D, V]`.
    targets: `[B, L]` int32.
    weights: `[B, L]` float32; 0 leaves a token out.
    chunk_tokens: C, tokens per chunk; at least one of each row is in it.

  Returns:
    `Loss` over all B L tokens.

  Example (uniform logits over V = 4):
    cross_entropy(zeros([1, 2, D]), ..., weights=[[1, 0]]) = (log 4, 1)
  """
  rows, length = targets.shape
  places = max(1, chunk_tokens // rows)
  if places >= length:
    total = _chunk_sum(hidden, unembedding, targets, weights)
    return Loss(total, jnp.sum(weights))

  num_chunks = -(-length // places)
  missing = num_chunks * places - length

  def chunked(x_BL: Array) -> Array:
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (x_BL.ndim - 2)
    chunks = jnp.pad(x_BL, padding).reshape(
      rows, num_chunks, places, *x_BL.shape[2:]
    )
    return jnp.swapaxes(chunks, 0, 1)

  @jax.checkpoint
  def add(total: Array, chunk: tuple[Array, Array, Array]):
    hidden, targets, weights = chunk
    return total + _chunk_sum(hidden, unembedding, targets, weights), ()

  total, _ = jax.lax.scan(
    add,
    jnp.zeros([], jnp.float32),
    (chunked(hidden), chunked(targets), chunked(weights)),
  )
  return Loss(total, jnp.sum(weights))


def next_token_loss(
  model: decoder.Decoder,
  params: dict,
  batch: batch_lib.Batch,
  chunk_tokens: int,
) -> Loss:
  """Cross-entropy of a batch's targets under a decoder."""
  hidden, _ = model.apply(
    {'params': params},
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    method='hidden',
  )
  with jax.named_scope('cross_entropy'):
    return cross_entropy(
      hidden,
      decoder.unembedding(params, model.config),
      batch.targets,
      batch.weights,
      chunk_tokens,
    )


def _chunk_sum(
  hidden_BLD: Array, unembedding: Array, targets_BL: Array, weights_BL: Array
) -> Array:
  logits_BLV = decoder.unembed(hidden_BLD, unembedding)
  log_total_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
  target_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)
  return jnp.sum((log_total_BL - target_BL[..., 0]) * weights_BL)
