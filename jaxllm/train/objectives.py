"""Losses as (sum, weight), so that microbatches and devices add up exactly.

Shapes: B batch, L length, D hidden size, V vocabulary, N = B L tokens, C tokens
per chunk.
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

  The logits of one chunk, `[C, V]` float32, are the largest array that exists;
  the backward pass computes them again. (131k tokens x 32k words at once would
  take 17 GB.) A chunk that holds all tokens is computed once.

  Args:
    hidden: `[B, L, D]`, what the head reads.
    unembedding: `[D, V]`.
    targets: `[B, L]` int32.
    weights: `[B, L]` float32; 0 leaves a token out.
    chunk_tokens: C, tokens per chunk.

  Returns:
    `Loss` over all B L tokens.

  Example (uniform logits over V = 4):
    cross_entropy(zeros([1, 2, D]), ..., weights=[[1, 0]]) = (log 4, 1)
  """
  num_tokens = targets.size
  hidden_ND = hidden.reshape(num_tokens, hidden.shape[-1])
  targets_N, weights_N = targets.reshape(-1), weights.reshape(-1)
  if chunk_tokens >= num_tokens:
    total = _chunk_sum(hidden_ND, unembedding, targets_N, weights_N)
    return Loss(total, jnp.sum(weights_N))

  num_chunks = -(-num_tokens // chunk_tokens)
  missing = num_chunks * chunk_tokens - num_tokens

  def chunked(x_N: Array) -> Array:
    padding = [(0, missing)] + [(0, 0)] * (x_N.ndim - 1)
    return jnp.pad(x_N, padding).reshape(
      num_chunks, chunk_tokens, *x_N.shape[1:]
    )

  @jax.checkpoint
  def add(total: Array, chunk: tuple[Array, Array, Array]):
    hidden_CD, targets_C, weights_C = chunk
    return total + _chunk_sum(hidden_CD, unembedding, targets_C, weights_C), ()

  total, _ = jax.lax.scan(
    add,
    jnp.zeros([], jnp.float32),
    (chunked(hidden_ND), chunked(targets_N), chunked(weights_N)),
  )
  return Loss(total, jnp.sum(weights_N))


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
  hidden_CD: Array, unembedding: Array, targets_C: Array, weights_C: Array
) -> Array:
  logits_CV = decoder.unembed(hidden_CD, unembedding)
  log_total_C = jax.nn.logsumexp(logits_CV, axis=-1)
  target_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0]
  return jnp.sum((log_total_C - target_C) * weights_C)
