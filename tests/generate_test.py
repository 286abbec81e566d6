"""Sampling: ends, independence of rows, greediness and honest probabilities."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import generate
from jaxllm.model import decoder

_CONFIG = decoder.DecoderConfig(
  vocab_size=16,
  hidden_size=16,
  intermediate_size=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  rope_theta=10000.0,
  rope_scaling=None,
  norm_epsilon=1e-6,
  attention_bias=False,
  mlp_bias=False,
  tie_embeddings=False,
  initializer='standard',
  init_scale=0.3,
  embedding_stddev=0.4,
  compute_dtype='float32',
  remat='none',
  attention='xla',
)
_MODEL = decoder.Decoder(_CONFIG)
_PAD = 15
_NEW = 6
_PROMPTS = np.array([[3, 4, 5, 6], [7, 8, 9, 9], [1, 2, 9, 9], [6, 6, 6, 9]])
_LENGTHS = np.array([4, 1, 2, 3])
_OPTIONS = {
  'max_new_tokens': _NEW,
  'temperature': 0.7,
  'top_k': 8,
  'top_p': 0.9,
  'end_tokens': (),
  'pad_id': _PAD,
}

# Compiling takes longer than these tiny models run.
_jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
_generate = _jit(generate.generate, static_argnames=('model', *_OPTIONS.keys()))


@functools.cache
def _params():
  tokens = jnp.zeros((1, 1), jnp.int32)
  return _jit(_MODEL.init)(jax.random.key(0), *[tokens] * 3)['params']


def _sample(
  seed=1, prompts=_PROMPTS, lengths=_LENGTHS, model=_MODEL, **changes
):
  options = {**_OPTIONS, **changes}
  key = jax.random.key(seed)
  generation = _generate(model, _params(), prompts, lengths, key, **options)
  return jax.tree.map(np.asarray, generation)


@_jit
def _fresh_logits(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  ones = jnp.ones_like(tokens)
  return _MODEL.apply({'params': params}, tokens, positions, ones)[0]


def _continuation_logits(generation):
  """The logits from which each token came, `[B, N, V]`, by fresh forwards."""
  rows = np.zeros((4, 4 + _NEW), np.int32)
  for row, length in enumerate(_LENGTHS):
    rows[row, :length] = _PROMPTS[row, :length]
    rows[row, length : length + _NEW] = generation.tokens[row]
  logits = np.asarray(_fresh_logits(_params(), rows))
  return np.stack(
    [
      logits[row, length - 1 : length - 1 + _NEW]
      for row, length in enumerate(_LENGTHS)
    ]
  )


def _log_softmax(logits):
  logits = logits - logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _select(values, tokens):
  return np.take_along_axis(values, np.asarray(tokens)[..., None], -1)[..., 0]


def test_log_probs_equal_a_fresh_forward():
  # The prompts' padding is token 9, which a leak would let through.
  generation = _sample()
  logits = _continuation_logits(generation) / 0.7
  expected = _select(_log_softmax(logits), generation.tokens)
  np.testing.assert_allclose(generation.log_probs, expected, atol=1e-4)

  filtered = generate.filter_logits(logits.reshape(-1, 16), 8, 0.9)
  filtered = np.asarray(filtered).reshape(logits.shape)
  expected = _select(_log_softmax(filtered), generation.tokens)
  assert np.isfinite(expected).all()
  np.testing.assert_allclose(generation.sampling_log_probs, expected, atol=1e-4)
  assert (generation.sampling_log_probs > generation.log_probs + 1e-3).all()

  np.testing.assert_array_equal(generation.lengths, np.full(4, _NEW))
  assert not generation.ended.any()


def test_greedy_takes_the_most_probable():
  generation = _sample(temperature=0.0)
  logits = _continuation_logits(generation)
  np.testing.assert_array_equal(generation.tokens, np.argmax(logits, -1))
  expected = _select(_log_softmax(logits), generation.tokens)
  np.testing.assert_allclose(generation.log_probs, expected, atol=1e-4)
  np.testing.assert_array_equal(generation.sampling_log_probs, np.zeros((4, 6)))


class _Counting(decoder.Decoder):
  """Notes the shape of every input it reads."""

  def hidden(self, tokens, positions, segment_ids, cache=None):
    jax.debug.callback(lambda: _shapes_read.append(tokens.shape))
    return super().hidden(tokens, positions, segment_ids, cache)


_shapes_read = []


def test_rows_end_after_any_end_token_and_the_loop_with_the_last():
  free = _sample()
  # Each row's third token and the first row's second: all rows end by then.
  end_tokens = {int(free.tokens[0, 1]), *free.tokens[:, 2].tolist()}
  _shapes_read.clear()
  generation = _sample(model=_Counting(_CONFIG), end_tokens=tuple(end_tokens))
  jax.effects_barrier()
  assert generation.ended.all()
  lengths = generation.lengths.tolist()
  assert len(set(lengths)) > 1
  last = [generation.tokens[row, n - 1] for row, n in enumerate(lengths)]
  assert len(set(last)) > 1
  for row, length in enumerate(lengths):
    is_end = np.isin(free.tokens[row], list(end_tokens))
    assert length == is_end.argmax() + 1
    for name in ('tokens', 'log_probs', 'sampling_log_probs'):
      ours, unended = getattr(generation, name), getattr(free, name)
      # Before the end the draws are those of a run without ends.
      np.testing.assert_allclose(ours[row, :length], unended[row, :length])
      fill = _PAD if name == 'tokens' else 0
      np.testing.assert_array_equal(
        ours[row, length:], np.full(_NEW - length, fill)
      )
  # The prompts were read once, and the last token of all never.
  assert _shapes_read == [(4, 4)] + [(4, 1)] * (max(lengths) - 1)


def test_a_row_depends_on_its_index_alone():
  together = _sample()
  fewer = _sample(prompts=_PROMPTS[:2], lengths=_LENGTHS[:2])
  others = _sample(
    prompts=np.vstack([_PROMPTS[:1], np.full((3, 4), 2)]),
    lengths=np.full(4, 4),
  )
  chex.assert_trees_all_equal(fewer.tokens, together.tokens[:2])
  chex.assert_trees_all_equal(others.tokens[0], together.tokens[0])
  chex.assert_trees_all_close(
    fewer.log_probs, together.log_probs[:2], atol=1e-5
  )
  # Two rows with one prompt are two samples, and another key a third.
  twins = _sample(prompts=np.tile(_PROMPTS[:1], (4, 1)), lengths=np.full(4, 4))
  assert (twins.tokens[0] != twins.tokens[1]).any()
  assert (_sample(seed=2).tokens != together.tokens).any()


def test_steps_draw_independently():
  # A model that always predicts the same: a key used twice would repeat.
  params = jax.tree.map(np.zeros_like, _params())
  generation = _generate(
    _MODEL, params, _PROMPTS, _LENGTHS, jax.random.key(3), **_OPTIONS
  )
  assert all(len(set(row.tolist())) > 2 for row in generation.tokens)


_draw = _jit(generate.draw, static_argnums=(2, 3, 4))


@pytest.mark.parametrize(
  ('temperature', 'top_k', 'top_p'),
  [(0.5, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.7, 5, 0.9)],
)
def test_frequencies_follow_the_distribution(temperature, top_k, top_p):
  count = 4096
  logits = np.linspace(-1.0, 1.0, 8, dtype=np.float32)[[3, 1, 7, 0, 4, 6, 2, 5]]
  drawn = _draw(
    np.tile(logits, (count, 1)), jax.random.key(0), temperature, top_k, top_p
  )
  log_probs = _log_softmax(logits / temperature)
  probs = np.exp(log_probs)
  if top_k:
    probs[np.argsort(probs)[:-top_k]] = 0
    probs /= probs.sum()
  more_probable = [probs[probs > prob].sum() for prob in probs]
  probs[np.array(more_probable) >= top_p] = 0
  probs /= probs.sum()

  observed = np.bincount(drawn.tokens, minlength=8) / count
  assert (observed[probs == 0] == 0).all()
  error = np.sqrt(probs * (1 - probs) / count)
  assert (np.abs(observed - probs) <= 4 * error).all()
  np.testing.assert_allclose(
    drawn.log_probs, log_probs[drawn.tokens], atol=1e-5
  )
  np.testing.assert_allclose(
    drawn.sampling_log_probs, np.log(probs[drawn.tokens]), atol=1e-5
  )


@pytest.mark.parametrize(
  ('temperature', 'top_k', 'top_p'),
  [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-6), (1e-30, 0, 1.0)],
)
def test_the_narrowest_draws_are_greedy(temperature, top_k, top_p):
  logits = np.random.RandomState(0).randn(64, 8).astype(np.float32) * 1e4
  drawn = _draw(logits, jax.random.key(0), temperature, top_k, top_p)
  np.testing.assert_array_equal(drawn.tokens, np.argmax(logits, -1))
  np.testing.assert_array_equal(drawn.sampling_log_probs, np.zeros(64))
  assert np.isfinite(drawn.log_probs).all()


@pytest.mark.parametrize(
  ('probs', 'top_k', 'top_p', 'expected'),
  [
    ([0.5, 0.2, 0.3], 2, 1.0, [0.5, 0, 0.3]),
    ([0.5, 0.2, 0.3], 0, 0.6, [0.5, 0, 0.3]),
    ([0.5, 0.2, 0.3], 0, 0.4, [0.5, 0, 0]),
    ([0.2, 0.5, 0.3], 0, 1e-9, [0, 0.5, 0]),
    ([0.5, 0.2, 0.3], 0, 1.0, [0.5, 0.2, 0.3]),
    ([0.5, 0.2, 0.3], 9, 1.0, [0.5, 0.2, 0.3]),
    # Top-p counts after top-k: 0.5 is 0.625 of what is left.
    ([0.5, 0.2, 0.3], 2, 0.6, [0.5, 0, 0]),
    # Exactly k, of equals the lower tokens.
    ([0.25, 0.25, 0.25, 0.25], 3, 1.0, [0.25, 0.25, 0.25, 0]),
  ],
)
def test_filter_logits(probs, top_k, top_p, expected):
  filtered = generate.filter_logits(jnp.log(jnp.array([probs])), top_k, top_p)
  np.testing.assert_allclose(jnp.exp(filtered), [expected], rtol=1e-6)


def test_a_bfloat16_tied_model_gives_float32_log_probs():
  config = dataclasses.replace(
    _CONFIG, compute_dtype='bfloat16', tie_embeddings=True
  )
  params = {k: v for k, v in _params().items() if k != 'lm_head'}
  sample = functools.partial(
    generate.generate, decoder.Decoder(config), **_OPTIONS
  )
  generation = jax.eval_shape(
    sample, params, _PROMPTS, _LENGTHS, jax.random.key(0)
  )
  chex.assert_type(generation.log_probs, jnp.float32)
  chex.assert_type(generation.tokens, jnp.int32)


@pytest.mark.parametrize(
  ('changes', 'complaint'),
  [
    ({'max_new_tokens': 0}, 'max_new_tokens=0; ask for at least 1'),
    ({'temperature': -1.0}, 'temperature=-1.0; use 0'),
    ({'temperature': float('nan')}, 'temperature=nan; use 0'),
    ({'top_k': -1}, 'top_k=-1; use 0'),
    ({'top_p': 0.0}, 'top_p=0.0; use a value in'),
    ({'top_p': 1.5}, 'top_p=1.5; use a value in'),
    ({'prompts': _PROMPTS[:, :0]}, r'prompts has shape \(4, 0\)'),
    ({'lengths': _LENGTHS[:3]}, r'prompt_lengths has shape \(3,\)'),
  ],
)
def test_refuses(changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    _sample(**changes)
