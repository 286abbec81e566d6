"""The layers of a Llama decoder, each thin.

Shapes are the suffixes of names:
  B batch, L length of the input, S slots of the cache, D hidden size,
  N query heads, K key and value heads, H head size, F intermediate size.

Parameters are float32; matrices multiply in the compute dtype; RMSNorm,
rotary embedding and softmax are float32 whatever the compute dtype.
"""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

from flax import linen as nn
from flax.typing import Dtype
from flax.typing import Initializer
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np


class RopeScaling(NamedTuple):
  """Llama 3's stretch of the rotary wavelengths to longer contexts.

  Attributes:
    factor: how much longer the context became, at least 1.
    low_frequency_factor: wavelengths over original_length / this are stretched
      by `factor`.
    high_frequency_factor: wavelengths under original_length / this are kept;
      between the two the frequencies are interpolated.
    original_length: tokens of context before the stretch.
  """

  factor: float
  low_frequency_factor: float
  high_frequency_factor: float
  original_length: int


class KVCache(NamedTuple):
  """The keys and values of every layer; slot s holds position s of its row.

  Attributes:
    keys: `[num_layers, B, S, K, H]`, rotated already.
    values: `[num_layers, B, S, K, H]`.
  """

  keys: Array
  values: Array


class Context(NamedTuple):
  """What every layer's attention shares, computed once per forward pass.

  Attributes:
    positions: a token's position within its sequence, `[B, L]`.
    cos: of the rotary angles, `[B, L, H / 2]` float32.
    sin: of the same.
    mask: who may attend to whom, `[B, 1, L, L]`, or `[B, 1, L, S]` with a
      cache.
  """

  positions: Array
  cos: Array
  sin: Array
  mask: Array


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> np.ndarray:
  """Returns the angle per position of each rotated pair, `[H / 2]` float32.

  Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021; the scaling
  is Llama 3.1's (Grattafiori et al., `The Llama 3 Herd of Models
  <https://arxiv.org/abs/2407.21783>`_, 2024, as its reference code has it).
  """
  frequency_H = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if scaling is None:
    return frequency_H.astype(np.float32)
  # How often the pair turned within the original context.
  turns_H = scaling.original_length * frequency_H / (2 * math.pi)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  kept_H = np.clip((turns_H - low) / (high - low), 0.0, 1.0)
  stretched_H = frequency_H / scaling.factor
  frequency_H = kept_H * frequency_H + (1 - kept_H) * stretched_H
  return frequency_H.astype(np.float32)


def rotate(x_BLNH: Array, cos_BLH: Array, sin_BLH: Array) -> Array:
  """Rotates pair i of every head, features i and i + H / 2, by its angle.

  Example, a head of size 4 and angles [90, 0] degrees:
    [1, 2, 3, 4] -> [-3, 2, 1, 4]
  """
  first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos_BLH[:, :, None, :], sin_BLH[:, :, None, :]
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x_BLNH.dtype)


def segment_mask(segment_ids: Array) -> Array:
  """Returns who shares a segment with whom, `[B, 1, L, L]` bool.

  Padding, segment 0, sees padding: no query is left without a key, so its
  softmax is finite. Causality is not in this mask; attention adds it.

  Example: [[1, 1, 2, 0]] -> [[[[1, 1, 0, 0],
                                [1, 1, 0, 0],
                                [0, 0, 1, 0],
                                [0, 0, 0, 1]]]]
  """
  return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def slot_mask(positions: Array, length: int) -> Array:
  """Returns which slots of a cache a token may read, `[B, 1, L, length]` bool.

  Example: positions [[1, 2]], length 4 -> [[[[1, 1, 0, 0],
                                             [1, 1, 1, 0]]]]
  """
  slots = jnp.arange(length)[None, None, None, :]
  return slots <= positions[:, None, :, None]


class RMSNorm(nn.Module):
  """Divides by the root mean square over D, then scales each feature.

  Zhang and Sennrich, `Root Mean Square Layer Normalization
  <https://arxiv.org/abs/1910.07467>`_, 2019.
  """

  epsilon: float
  dtype: Dtype

  @nn.compact
  def __call__(self, x_BLD: Array) -> Array:
    scale_D = self.param(
      'scale', nn.initializers.ones, (x_BLD.shape[-1],), jnp.float32
    )
    x_BLD = x_BLD.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
    x_BLD = x_BLD * jax.lax.rsqrt(mean_square + self.epsilon)
    return (x_BLD * scale_D[None, None, :]).astype(self.dtype)


class Attention(nn.Module):
  """Grouped-query attention with rotary positions.

  Ainslie et al., `GQA <https://arxiv.org/abs/2305.13245>`_, 2023.

  Attributes:
    num_heads: N.
    num_kv_heads: K, divides N; query head n reads key head n // (N / K).
    head_dim: H.
    use_bias: whether the four projections have biases.
    implementation: of `jax.nn.dot_product_attention`, 'xla' or 'cudnn', when
      there is no cache. With a cache 'xla' always serves: a step of one query
      is bound by reading the cache, and cuDNN refuses some of its shapes.
    dtype: in which the projections multiply.
    kernel_init: the initializer of the four kernels.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  use_bias: bool
  implementation: str
  dtype: Dtype
  kernel_init: Initializer

  @nn.compact
  def __call__(
    self, x_BLD: Array, context: Context, cache: KVCache | None, layer: Array
  ) -> tuple[Array, KVCache | None]:
    """Attends, within the input or, given a cache, to the cache.

    Args:
      x_BLD: the normalized input.
      context: positions, rotary angles and mask.
      cache: None, or the cache of all layers.
      layer: the index of this layer in the cache.

    Returns:
      The output `[B, L, D]` and the cache with this input written.
    """
    B, L, D = x_BLD.shape
    N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
    dense = _dense(self)
    q_BLNH = dense(N * H, name='q_proj')(x_BLD).reshape(B, L, N, H)
    k_BLKH = dense(K * H, name='k_proj')(x_BLD).reshape(B, L, K, H)
    v_BLKH = dense(K * H, name='v_proj')(x_BLD).reshape(B, L, K, H)
    q_BLNH = rotate(q_BLNH, context.cos, context.sin)
    k_BLKH = rotate(k_BLKH, context.cos, context.sin)
    if cache is None:
      # Saying "causal" beside the mask lets cuDNN skip the upper triangle.
      y_BLNH = jax.nn.dot_product_attention(
        q_BLNH,
        k_BLKH,
        v_BLKH,
        mask=context.mask,
        is_causal=True,
        implementation=self.implementation,
      )
    else:
      cache = write_cache(cache, layer, context.positions, k_BLKH, v_BLKH)
      y_BLNH = jax.nn.dot_product_attention(
        q_BLNH,
        cache.keys[layer],
        cache.values[layer],
        mask=context.mask,
        implementation='xla',
      )
    y_BLD = dense(D, name='o_proj')(y_BLNH.reshape(B, L, N * H))
    return y_BLD, cache


class SwiGLU(nn.Module):
  """down(silu(gate(x)) * up(x)).

  Shazeer, `GLU Variants Improve Transformer
  <https://arxiv.org/abs/2002.05202>`_, 2020.
  """

  intermediate_size: int
  use_bias: bool
  dtype: Dtype
  kernel_init: Initializer

  @nn.compact
  def __call__(self, x_BLD: Array) -> Array:
    dense = _dense(self)
    gate_BLF = dense(self.intermediate_size, name='gate_proj')(x_BLD)
    up_BLF = dense(self.intermediate_size, name='up_proj')(x_BLD)
    y_BLF = nn.silu(gate_BLF) * up_BLF
    return dense(x_BLD.shape[-1], name='down_proj')(y_BLF)


def write_cache(
  cache: KVCache,
  layer: Array,
  positions_BL: Array,
  k_BLKH: Array,
  v_BLKH: Array,
) -> KVCache:
  """Writes the token at position p of a row to slot p of that row.

  Example, one row of four slots that holds [a, b, -, -]; the keys [c] at
  positions [[2]] make it [a, b, c, -].

  A position outside the slots is not written.
  """
  rows_B1 = jnp.arange(positions_BL.shape[0])[:, None]
  slots = (layer, rows_B1, positions_BL)
  return KVCache(
    keys=cache.keys.at[slots].set(k_BLKH.astype(cache.keys.dtype)),
    values=cache.values.at[slots].set(v_BLKH.astype(cache.values.dtype)),
  )


def _dense(layer: Attention | SwiGLU) -> Callable[..., nn.Dense]:
  return functools.partial(
    nn.Dense,
    use_bias=layer.use_bias,
    dtype=layer.dtype,
    param_dtype=jnp.float32,
    kernel_init=layer.kernel_init,
  )
