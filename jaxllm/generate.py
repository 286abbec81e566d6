"""Samples continuations: one prefill, then a loop over a cache of keys.

The prompts are read once. A `lax.while_loop` then draws a token for every row,
reads the drawn tokens, and ends as soon as every row has ended.

Shapes are the suffixes of names:
  B batch, P prompt length, N new tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from jaxllm.model import decoder
from jaxllm.model import layers


class Generation(NamedTuple):
  """What was sampled; past a row's length tokens are padding, the rest 0.

  Attributes:
    tokens: `[B, N]`, without the prompt.
    log_probs: `[B, N]` float32, of each token under the model at the sampling
      temperature; at temperature 0 under the model as it is.
    sampling_log_probs: `[B, N]` float32, of each token under the distribution
      it was drawn from, after top-k and top-p; at temperature 0 this is 0.
    lengths: `[B]`, tokens sampled, the end token included.
    ended: `[B]`, whether the row reached an end token.
  """

  tokens: Array
  log_probs: Array
  sampling_log_probs: Array
  lengths: Array
  ended: Array


class Drawn(NamedTuple):
  """A token for every row, all fields `[B]`; see `Generation`."""

  tokens: Array
  log_probs: Array
  sampling_log_probs: Array


def generate(
  model: decoder.Decoder,
  params: Mapping[str, Any],
  prompts: Array,
  prompt_lengths: Array,
  key: Array,
  *,
  max_new_tokens: int,
  temperature: float,
  top_k: int,
  top_p: float,
  end_tokens: tuple[int, ...],
  pad_id: int,
) -> Generation:
  """Samples a continuation of every prompt.

  Token n of row b is drawn with `fold_in(fold_in(key, n), b)`: what a row
  samples depends neither on the other rows nor on how many there are. Under
  jit, `model` and all keyword arguments are static.

  Example, end_tokens (2,), pad_id 0, max_new_tokens 3:
    prompts [[5, 6], [7, 0]], prompt_lengths [2, 1]
    tokens  [[8, 2, 0], [9, 9, 9]], lengths [2, 3], ended [True, False]

  Args:
    model: the decoder.
    params: its parameters.
    prompts: `[B, P]` tokens, padded on the right with any of the ids.
    prompt_lengths: `[B]`, from 1 to P.
    key: a random key.
    max_new_tokens: N, at least 1.
    temperature: divides the logits; 0 takes the most probable token.
    top_k: draws among the k most probable tokens only; 0 is off.
    top_p: draws among the fewest most probable tokens that together reach this
      probability (Holtzman et al., `The Curious Case of Neural Text
      Degeneration <https://arxiv.org/abs/1904.09751>`_, 2020), counted after
      top-k; 1 is off.
    end_tokens: a row ends after any of these.
    pad_id: fills a row behind its end.

  Returns:
    The tokens and their log-probabilities.

  Raises:
    ValueError: an argument is outside its range.
  """
  options = _Options(
    max_new_tokens, temperature, top_k, top_p, end_tokens, pad_id
  )
  _check(prompts, prompt_lengths, options)
  return _generate(model, params, prompts, prompt_lengths, key, options)


def draw(
  logits_BV: Array, key: Array, temperature: float, top_k: int, top_p: float
) -> Drawn:
  """Draws a token for row b with `fold_in(key, b)`.

  Args:
    logits_BV: float32.
    key: a random key.
    temperature: see `generate`, as for top_k and top_p.
    top_k: likewise.
    top_p: likewise.
  """
  if temperature == 0.0:
    tokens = jnp.argmax(logits_BV, axis=-1)
    log_probs = _select(jax.nn.log_softmax(logits_BV), tokens)
    return Drawn(tokens, log_probs, jnp.zeros_like(log_probs))
  # With the largest at 0, dividing by a tiny temperature cannot overflow.
  largest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  logits_BV = (logits_BV - largest_B1) / temperature
  filtered_BV = filter_logits(logits_BV, top_k, top_p)
  row_keys = jax.vmap(jax.random.fold_in, (None, 0))(
    key, jnp.arange(logits_BV.shape[0])
  )
  tokens = jax.vmap(jax.random.categorical)(row_keys, filtered_BV)
  return Drawn(
    tokens,
    log_probs=_select(jax.nn.log_softmax(logits_BV), tokens),
    sampling_log_probs=_select(jax.nn.log_softmax(filtered_BV), tokens),
  )


def filter_logits(logits_BV: Array, top_k: int, top_p: float) -> Array:
  """Returns the logits with -inf where top-k or top-p rules a token out.

  Of equal logits the lower token counts as the more probable.

  Example, probabilities instead of logits:
    [.5, .2, .3], top_k 2            -> [.5, 0, .3]
    [.5, .2, .3], top_k 0, top_p .6  -> [.5, 0, .3]: .5 alone does not reach .6
  """
  vocab_size = logits_BV.shape[-1]
  if (top_k == 0 or top_k >= vocab_size) and top_p == 1.0:
    return logits_BV
  kept = min(top_k, vocab_size) if top_k else vocab_size
  descending, tokens = jax.lax.top_k(logits_BV, kept)
  if top_p < 1.0:
    probs = jax.nn.softmax(descending, axis=-1)
    # A token stays if those before it fall short of top_p: the first always.
    before = jnp.cumsum(probs, axis=-1) - probs
    descending = jnp.where(before < top_p, descending, -jnp.inf)
  rows = jnp.arange(logits_BV.shape[0])[:, None]
  return jnp.full_like(logits_BV, -jnp.inf).at[rows, tokens].set(descending)


class _Options(NamedTuple):
  """The keyword arguments of `generate`."""

  max_new_tokens: int
  temperature: float
  top_k: int
  top_p: float
  end_tokens: tuple[int, ...]
  pad_id: int


class _State(NamedTuple):
  """The loop's: `step` tokens of each row are drawn, all but the last read."""

  step: Array
  generation: Generation
  cache: layers.KVCache


def _generate(
  model: decoder.Decoder,
  params: Mapping[str, Any],
  prompts: Array,
  prompt_lengths: Array,
  key: Array,
  options: _Options,
) -> Generation:
  batch_size, prompt_size = prompts.shape
  positions = jnp.broadcast_to(jnp.arange(prompt_size)[None], prompts.shape)
  empty_cache = decoder.init_cache(
    model.config, batch_size, prompt_size + options.max_new_tokens
  )

  def is_unfinished(state: _State) -> Array:
    return (state.step < options.max_new_tokens) & ~jnp.all(
      state.generation.ended
    )

  def advance(state: _State) -> _State:
    last = state.step - 1
    tokens = state.generation.tokens[:, last][:, None]
    positions = (prompt_lengths + last)[:, None]
    first = jnp.zeros_like(prompt_lengths)
    logits, cache = _read(model, params, tokens, positions, first, state.cache)
    generation = _extend(state.generation, state.step, logits, key, options)
    return _State(state.step + 1, generation, cache)

  with jax.named_scope('prefill'):
    logits, cache = _read(
      model, params, prompts, positions, prompt_lengths - 1, empty_cache
    )
    generation = _extend(
      _empty(batch_size, options), jnp.int32(0), logits, key, options
    )
  with jax.named_scope('decode'):
    state = _State(jnp.int32(1), generation, cache)
    return jax.lax.while_loop(is_unfinished, advance, state).generation


def _read(
  model: decoder.Decoder,
  params: Mapping[str, Any],
  tokens: Array,
  positions: Array,
  last: Array,
  cache: layers.KVCache,
) -> tuple[Array, layers.KVCache]:
  """Reads tokens `[B, L]`; returns the logits `[B, V]` after index last `[B]`.

  Only one position a row passes through the head: the logits of a whole prompt
  would be the largest array of all.
  """
  x_BLD, cache = model.apply(
    {'params': params},
    tokens,
    positions,
    jnp.ones_like(tokens),
    cache,
    method='hidden',
  )
  x_BD = jnp.take_along_axis(x_BLD, last[:, None, None], axis=1)[:, 0]
  head_DV = decoder.unembedding(params, model.config)
  return decoder.unembed(x_BD, head_DV), cache


def _select(values_BV: Array, tokens_B: Array) -> Array:
  return jnp.take_along_axis(values_BV, tokens_B[:, None], axis=-1)[:, 0]


def _extend(
  generation: Generation,
  step: Array,
  logits_BV: Array,
  key: Array,
  options: _Options,
) -> Generation:
  """Draws and writes column `step`; rows that have ended get padding."""
  drawn = draw(
    logits_BV,
    jax.random.fold_in(key, step),
    options.temperature,
    options.top_k,
    options.top_p,
  )
  live = ~generation.ended
  tokens = jnp.where(live, drawn.tokens.astype(jnp.int32), options.pad_id)
  is_end = jnp.isin(tokens, jnp.array(options.end_tokens, jnp.int32))
  sampling_log_probs = jnp.where(live, drawn.sampling_log_probs, 0.0)
  return Generation(
    tokens=generation.tokens.at[:, step].set(tokens),
    log_probs=generation.log_probs.at[:, step].set(
      jnp.where(live, drawn.log_probs, 0.0)
    ),
    sampling_log_probs=generation.sampling_log_probs.at[:, step].set(
      sampling_log_probs
    ),
    lengths=generation.lengths + live,
    ended=generation.ended | (live & is_end),
  )


def _empty(batch_size: int, options: _Options) -> Generation:
  shape = (batch_size, options.max_new_tokens)
  return Generation(
    tokens=jnp.full(shape, options.pad_id, jnp.int32),
    log_probs=jnp.zeros(shape, jnp.float32),
    sampling_log_probs=jnp.zeros(shape, jnp.float32),
    lengths=jnp.zeros(batch_size, jnp.int32),
    ended=jnp.zeros(batch_size, bool),
  )


def _check(prompts: Array, prompt_lengths: Array, options: _Options) -> None:
  if prompts.ndim != 2 or 0 in prompts.shape:
    raise ValueError(
      f'prompts has shape {prompts.shape}; pass [B, P] with at least one '
      'prompt of at least one token'
    )
  if prompt_lengths.shape != prompts.shape[:1]:
    raise ValueError(
      f'prompt_lengths has shape {prompt_lengths.shape}; pass one length for '
      f'each of the {prompts.shape[0]} prompts'
    )
  if options.max_new_tokens < 1:
    raise ValueError(
      f'max_new_tokens={options.max_new_tokens}; ask for at least 1'
    )
  if not options.temperature >= 0.0:
    raise ValueError(
      f'temperature={options.temperature}; use 0 (greedy) or above'
    )
  if options.top_k < 0:
    raise ValueError(f'top_k={options.top_k}; use 0 (off) or above')
  if not 0.0 < options.top_p <= 1.0:
    raise ValueError(f'top_p={options.top_p}; use a value in (0, 1], 1 is off')
