"""Chunked cross-entropy equals the plain one, in value and gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.train import objectives


def _inputs():
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.standard_normal((2, 5, 8)), jnp.float32)
  unembedding = jnp.asarray(rng.standard_normal((8, 11)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, 11, (2, 5)), jnp.int32)
  weights = jnp.asarray(rng.integers(0, 2, (2, 5)), jnp.float32)
  return hidden, unembedding, targets, weights


def _plain(hidden, unembedding, targets, weights):
  losses = optax.softmax_cross_entropy_with_integer_labels(
    hidden @ unembedding, targets
  )
  return jnp.sum(losses * weights)


@pytest.mark.parametrize('chunk', [1, 3, 5, 10, 64])
def test_any_chunk_gives_the_plain_sum_and_gradient(chunk):
  hidden, unembedding, targets, weights = _inputs()

  def chunked(hidden, unembedding):
    loss = objectives.cross_entropy(
      hidden, unembedding, targets, weights, chunk
    )
    return loss.sum

  expected = jax.value_and_grad(_plain, argnums=(0, 1))(*_inputs())
  found = jax.value_and_grad(chunked, argnums=(0, 1))(hidden, unembedding)
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def test_weight_counts_targets_and_padding_of_chunks_counts_nothing():
  hidden, unembedding, targets, weights = _inputs()
  loss = objectives.cross_entropy(hidden, unembedding, targets, weights, 3)
  assert float(loss.weight) == float(weights.sum())


def test_only_one_chunk_of_logits_exists():
  """The compiled program's work space shrinks with the chunk."""
  shape = jax.ShapeDtypeStruct

  def work_space(chunk):
    gradient = jax.jit(
      jax.grad(
        lambda h, u, t, w: objectives.cross_entropy(h, u, t, w, chunk).sum
      )
    )
    compiled = gradient.lower(
      shape((4, 256, 8), jnp.float32),
      shape((8, 1024), jnp.float32),
      shape((4, 256), jnp.int32),
      shape((4, 256), jnp.float32),
    ).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert work_space(64) < work_space(1024) / 4
