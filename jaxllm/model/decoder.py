"""A Llama decoder whose layers are scanned.

The tree of parameters, all float32, `layers` stacked on a leading axis:
  embed/embedding [V, D]               layers/mlp/gate_proj/kernel [D, F]
  layers/input_norm/scale [D]          layers/mlp/up_proj/kernel [D, F]
  layers/attention/q_proj/kernel       layers/mlp/down_proj/kernel [F, D]
  layers/attention/{k,v,o}_proj/...    final_norm/scale [D]
  layers/post_attention_norm/scale     lm_head/kernel [D, V], unless tied

Shapes are the suffixes of names:
  B batch, L length, D hidden size, V vocabulary, F intermediate size.

Touvron et al., `Llama 2 <https://arxiv.org/abs/2307.09288>`_, 2023.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp

from jaxllm import sharding
from jaxllm.model import initializers
from jaxllm.model import layers

_CHOICES = {
  'initializer': initializers.NAMES,
  'compute_dtype': ('float32', 'bfloat16'),
  'remat': ('none', 'full', 'dots'),
  'attention': ('xla', 'cudnn'),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder and how it computes; every field is required.

  Attributes:
    vocab_size: V.
    hidden_size: D.
    intermediate_size: F.
    num_layers: how many blocks.
    num_heads: query heads.
    num_kv_heads: key and value heads; divides num_heads.
    head_dim: features per head, even; need not be hidden_size / num_heads.
    rope_theta: base of the rotary wavelengths.
    rope_scaling: None, or Llama 3's stretch for longer contexts.
    norm_epsilon: added to the mean square inside RMSNorm.
    attention_bias: whether the q, k, v and o projections have biases.
    mlp_bias: whether the gate, up and down projections have biases.
    tie_embeddings: whether the head is the transposed embedding.
    initializer: of the decoder's matrices, one of `initializers.NAMES`.
    init_scale: its scale, see `initializers.matrix_initializer`.
    embedding_stddev: standard deviation of the embedding and the head.
    compute_dtype: 'float32' or 'bfloat16', in which matrices multiply.
    remat: what the backward pass recomputes: 'none'; 'full', everything
      inside a block; 'dots', everything but the matrix products.
    attention: 'xla', or 'cudnn' (GPU, bfloat16, head_dim a multiple of 8).
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  rope_scaling: layers.RopeScaling | None
  norm_epsilon: float
  attention_bias: bool
  mlp_bias: bool
  tie_embeddings: bool
  initializer: str
  init_scale: float
  embedding_stddev: float
  compute_dtype: str
  remat: str
  attention: str

  def __post_init__(self):
    for ok, complaint in _conditions(self):
      if not ok:
        raise ValueError(f'model: {complaint}')

  @property
  def dtype(self) -> jnp.dtype:
    """The compute dtype."""
    return jnp.dtype(self.compute_dtype)


class Decoder(nn.Module):
  """Tokens in, the logits of the next token out."""

  config: DecoderConfig

  def setup(self):
    config = self.config
    stddev = nn.initializers.normal(stddev=config.embedding_stddev)
    self.embed = nn.Embed(
      config.vocab_size,
      config.hidden_size,
      # The rows are cast after the look-up: their gradients then add up in
      # float32, however often a token occurs.
      dtype=jnp.float32,
      param_dtype=jnp.float32,
      embedding_init=stddev,
    )
    self.layers = nn.scan(
      _rematerialized(config.remat),
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(0, nn.broadcast),
      length=config.num_layers,
    )(config)
    self.final_norm = layers.RMSNorm(config.norm_epsilon, config.dtype)
    if not config.tie_embeddings:
      self.lm_head = nn.Dense(
        config.vocab_size,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=jnp.float32,
        kernel_init=stddev,
        dot_general=functools.partial(
          jax.lax.dot_general, preferred_element_type=jnp.float32
        ),
      )

  def __call__(
    self,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    cache: layers.KVCache | None = None,
  ) -> tuple[Array, layers.KVCache | None]:
    """Returns the logits of every position's next token, and the cache.

    Args:
      tokens: `[B, L]` ids below V; V and beyond make NaN.
      positions: `[B, L]`, a token's position within its own sequence.
      segment_ids: `[B, L]`, equal for the tokens of one sequence of a packed
        row and 0 for padding. A token attends to itself and to what came
        before it in the row with the same segment id; see `hidden` for rows
        read with a cache.
      cache: None, or the keys and values of what the rows hold so far.

    Returns:
      Logits `[B, L, V]` float32, and the cache with these tokens written
      (None without a cache).
    """
    x_BLD, cache = self.hidden(tokens, positions, segment_ids, cache)
    with jax.named_scope('lm_head'):
      if self.config.tie_embeddings:
        return unembed(x_BLD, self.embed.embedding.T), cache
      return self.lm_head(x_BLD), cache

  def hidden(
    self,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    cache: layers.KVCache | None = None,
  ) -> tuple[Array, layers.KVCache | None]:
    """Returns what the head reads, `[B, L, D]` in compute dtype, and the cache.

    With a cache the rows are not packed: the token at position p of a row is
    written to slot p of that row, and attends to the slots up to its own;
    segment ids play no part. Prompts of different lengths may therefore be
    padded on the right: a slot of padding lies behind every real token, and
    the token that comes to its position overwrites it before any reads it.
    Positions must stay below the length of the cache.

    Example, two rows padded to three and the mask of the last query:
      tokens    [[5, 6, 7], [8, 9, 0]],  positions [[0, 1, 2], [0, 1, 2]]
      next tokens [[3], [4]],  positions [[3], [2]]
      slots read  [[0, 1, 2, 3], [0, 1, 2]]: the 0 at slot 2 became the 4
    """
    with jax.named_scope('embed'):
      x_BLD = self.embed(tokens).astype(self.config.dtype)
    context = self._context(positions, segment_ids, cache)
    layer_indices = jnp.arange(self.config.num_layers)
    # The cache is carried, not scanned over: a step writes its own tokens in
    # place where scanning would copy every slot.
    (x_BLD, cache), _ = self.layers((x_BLD, cache), layer_indices, context)
    with jax.named_scope('final_norm'):
      return self.final_norm(x_BLD), cache

  def _context(
    self, positions: Array, segment_ids: Array, cache: layers.KVCache | None
  ) -> layers.Context:
    config = self.config
    frequencies = layers.rope_frequencies(
      config.head_dim, config.rope_theta, config.rope_scaling
    )
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None]
    if cache is None:
      mask = layers.segment_mask(segment_ids)
    else:
      mask = layers.slot_mask(positions, cache.keys.shape[2])
    return layers.Context(positions, jnp.cos(angles), jnp.sin(angles), mask)


class Block(nn.Module):
  """One layer: attention, then the feed-forward network, both residual."""

  config: DecoderConfig

  @nn.compact
  def __call__(
    self,
    carry: tuple[Array, layers.KVCache | None],
    layer: Array,
    context: layers.Context,
  ) -> tuple[tuple[Array, layers.KVCache | None], None]:
    config = self.config
    kernel_init = initializers.matrix_initializer(
      config.initializer, config.init_scale
    )
    norm = functools.partial(layers.RMSNorm, config.norm_epsilon, config.dtype)
    x_BLD, cache = carry
    x_BLD = sharding.constrain_rows(x_BLD)
    with jax.named_scope('attention'):
      normalized_BLD = norm(name='input_norm')(x_BLD)
      attention = layers.Attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        use_bias=config.attention_bias,
        implementation=config.attention,
        dtype=config.dtype,
        kernel_init=kernel_init,
        name='attention',
      )
      y_BLD, cache = attention(normalized_BLD, context, cache, layer)
      x_BLD = x_BLD + y_BLD
    with jax.named_scope('mlp'):
      normalized_BLD = norm(name='post_attention_norm')(x_BLD)
      mlp = layers.SwiGLU(
        intermediate_size=config.intermediate_size,
        use_bias=config.mlp_bias,
        dtype=config.dtype,
        kernel_init=kernel_init,
        name='mlp',
      )
      x_BLD = x_BLD + mlp(normalized_BLD)
    return (sharding.constrain_rows(x_BLD), cache), None


def unembedding(params: Mapping[str, Any], config: DecoderConfig) -> Array:
  """Returns the matrix `[D, V]` that turns `hidden` into logits."""
  if config.tie_embeddings:
    return params['embed']['embedding'].T
  return params['lm_head']['kernel']


def unembed(x: Array, unembedding_DV: Array) -> Array:
  """Returns logits `[..., V]` float32 of hidden states x `[..., D]`.

  The factors are multiplied in the dtype of x and added up in float32.
  """
  return jnp.matmul(
    x, unembedding_DV.astype(x.dtype), preferred_element_type=jnp.float32
  )


def init_cache(
  config: DecoderConfig, batch_size: int, length: int
) -> layers.KVCache:
  """Returns an empty cache of `length` slots for each of `batch_size` rows."""
  heads = (config.num_kv_heads, config.head_dim)
  shape = (config.num_layers, batch_size, length, *heads)
  return layers.KVCache(
    keys=jnp.zeros(shape, config.dtype), values=jnp.zeros(shape, config.dtype)
  )


def count_parameters(params: Any) -> int:
  """Returns how many numbers the tree holds; shapes suffice as leaves."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def flops_per_token(config: DecoderConfig, length: int) -> float:
  """Returns the operations that training spends on a token of a sequence.

  6 per parameter of a matrix product (2 forward, 4 backward), the head
  included and the embedding's look-up not, and 12 layers heads head_dim length
  for the attention scores and their use. The masked half of the scores counts,
  and what remat computes again does not: the numerator of MFU in Chowdhery et
  al., `PaLM <https://arxiv.org/abs/2204.02311>`_, 2022, appendix B.

  Args:
    config: of the decoder.
    length: tokens of a sequence.
  """
  query_size = config.num_heads * config.head_dim
  kv_size = config.num_kv_heads * config.head_dim
  attention = config.hidden_size * (2 * query_size + 2 * kv_size)
  mlp = 3 * config.hidden_size * config.intermediate_size
  head = config.hidden_size * config.vocab_size
  matrices = config.num_layers * (attention + mlp) + head
  return 6.0 * matrices + 12.0 * config.num_layers * query_size * length


def _conditions(config: DecoderConfig) -> Iterator[tuple[bool, str]]:
  """Yields whether each condition holds and what to say where it does not."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.type in (int, float):
      yield 0 < value < math.inf, f'{field.name}={value} must be positive'
    if field.name in _CHOICES:
      choices = _CHOICES[field.name]
      yield (
        value in choices,
        f'{field.name}={value!r} is unknown; use one of {", ".join(choices)}',
      )
  yield (
    config.num_heads % config.num_kv_heads == 0,
    f'num_heads={config.num_heads} is not divisible by num_kv_heads='
    f'{config.num_kv_heads}; let num_kv_heads be a divisor of num_heads',
  )
  yield (
    config.head_dim % 2 == 0,
    f'head_dim={config.head_dim} is odd, but rotary embedding turns pairs of '
    'features; use an even head_dim',
  )
  yield (
    config.attention != 'cudnn'
    or (config.compute_dtype == 'bfloat16' and config.head_dim % 8 == 0),
    f'attention=cudnn needs compute_dtype=bfloat16 (is {config.compute_dtype}) '
    f'and a head_dim divisible by 8 (is {config.head_dim}); change them or use '
    'attention=xla',
  )
  scaling = config.rope_scaling
  if scaling is not None:
    yield (
      scaling.factor >= 1 and scaling.original_length > 0,
      f'{scaling} needs factor >= 1 and original_length > 0',
    )
    yield (
      0 < scaling.low_frequency_factor < scaling.high_frequency_factor,
      f'{scaling} needs 0 < low_frequency_factor < high_frequency_factor',
    )


def _rematerialized(remat: str) -> type[nn.Module]:
  if remat == 'none':
    return Block
  dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  policy = {'full': None, 'dots': dots}[remat]
  # Inside a scan XLA cannot merge the recomputation with the original.
  return nn.remat(Block, policy=policy, prevent_cse=False)
