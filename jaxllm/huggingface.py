"""Llama weights and configs, between this project's names and Hugging Face's.

One table names every parameter on both sides; both directions are read from
it. Whatever the table or the model's own tree does not know is an error.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.model import decoder
from jaxllm.model import layers


class _Row(NamedTuple):
  """A parameter: our path, their name, and whether the matrix is transposed.

  `{layer}` stands for the index of a layer, over which our array is stacked.
  """

  path: str
  name: str
  is_transposed: bool


def _projection(ours: str, theirs: str) -> tuple[_Row, _Row]:
  # torch.nn.Linear keeps [D_out, D_in], a flax kernel is [D_in, D_out].
  return (
    _Row(f'{ours}/kernel', f'{theirs}.weight', True),
    _Row(f'{ours}/bias', f'{theirs}.bias', False),
  )


_LAYER = 'model.layers.{layer}'
_TABLE = (
  _Row('embed/embedding', 'model.embed_tokens.weight', False),
  _Row('layers/input_norm/scale', f'{_LAYER}.input_layernorm.weight', False),
  *_projection('layers/attention/q_proj', f'{_LAYER}.self_attn.q_proj'),
  *_projection('layers/attention/k_proj', f'{_LAYER}.self_attn.k_proj'),
  *_projection('layers/attention/v_proj', f'{_LAYER}.self_attn.v_proj'),
  *_projection('layers/attention/o_proj', f'{_LAYER}.self_attn.o_proj'),
  _Row(
    'layers/post_attention_norm/scale',
    f'{_LAYER}.post_attention_layernorm.weight',
    False,
  ),
  *_projection('layers/mlp/gate_proj', f'{_LAYER}.mlp.gate_proj'),
  *_projection('layers/mlp/up_proj', f'{_LAYER}.mlp.up_proj'),
  *_projection('layers/mlp/down_proj', f'{_LAYER}.mlp.down_proj'),
  _Row('final_norm/scale', 'model.norm.weight', False),
  _Row('lm_head/kernel', 'lm_head.weight', True),
)

_SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'intermediate_size': 'intermediate_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
}
_SCALING = {
  'factor': 'factor',
  'low_frequency_factor': 'low_freq_factor',
  'high_frequency_factor': 'high_freq_factor',
  'original_length': 'original_max_position_embeddings',
}

# Buffers of old checkpoints that follow from the config.
_DERIVED_SUFFIX = '.rotary_emb.inv_freq'


def from_huggingface(
  tensors: Mapping[str, np.ndarray], config: decoder.DecoderConfig
) -> dict[str, Any]:
  """Returns a decoder's parameters from a Llama checkpoint's tensors.

  Args:
    tensors: by name, of any float dtype.
    config: of the decoder that the tensors belong to.

  Returns:
    The tree of parameters, float32 numpy arrays.

  Raises:
    ValueError: a tensor is missing, unknown or of another shape.
  """
  unread = dict(tensors)
  params: dict[str, Any] = {}
  for row, shape in _rows(config):
    parts = []
    for name in _names(row, config):
      if name not in unread:
        raise ValueError(
          f'the checkpoint has no tensor {name}; the config needs it: check '
          'num_layers, attention_bias, mlp_bias and tie_embeddings'
        )
      part = np.asarray(unread.pop(name)).astype(np.float32)
      parts.append(part.T if row.is_transposed else part)
      if parts[-1].shape != (shape[1:] if _is_stacked(row) else shape):
        raise ValueError(
          f'tensor {name} has shape {part.shape}, but the config makes '
          f'{row.path} {shape}; check the sizes in the config'
        )
    _insert(params, row.path, np.stack(parts) if _is_stacked(row) else parts[0])
  _check_unread(unread, params, config)
  return params


def to_huggingface(
  params: Mapping[str, Any], config: decoder.DecoderConfig
) -> dict[str, np.ndarray]:
  """Returns a Llama checkpoint's tensors, float32, from a decoder's parameters.

  Raises:
    ValueError: a parameter is missing, unknown or of another shape.
  """
  leaves = _flatten(params)
  tensors = {}
  for row, shape in _rows(config):
    if row.path not in leaves:
      raise ValueError(f'the parameters lack {row.path}; the config needs it')
    leaf = leaves.pop(row.path)
    if leaf.shape != shape:
      raise ValueError(
        f'{row.path} has shape {leaf.shape}, but the config makes it {shape}'
      )
    tensors |= _tensors(row, leaf, config)
  if leaves:
    raise ValueError(
      f'the config knows no parameter {", ".join(sorted(leaves))}; remove it '
      'or correct the config'
    )
  return tensors


def parameter_shapes(
  config: decoder.DecoderConfig,
) -> dict[str, tuple[int, ...]]:
  """Shape of every parameter of a decoder, by path, in the table's order."""
  return {row.path: shape for row, shape in _rows(config)}


def one_to_huggingface(
  path: str, parameter: Any, config: decoder.DecoderConfig
) -> dict[str, np.ndarray]:
  """Returns the tensors of one parameter; see `to_huggingface`.

  Example: `layers/mlp/up_proj/kernel` `[N, D, F]` gives the tensors
  `model.layers.0.mlp.up_proj.weight` `[F, D]` to N - 1.
  """
  (row,) = (row for row in _TABLE if row.path == path)
  return _tensors(row, parameter, config)


def config_from_huggingface(
  values: Mapping[str, Any],
  *,
  initializer: str,
  init_scale: float,
  embedding_stddev: float,
  compute_dtype: str,
  remat: str,
  attention: str,
) -> decoder.DecoderConfig:
  """Returns the decoder's config that a Llama `config.json` describes.

  Args:
    values: of the file. A key that Hugging Face may leave out has the value of
      its LlamaConfig.
    initializer: this and what follows are not in the file; see
      `decoder.DecoderConfig`.
    init_scale: likewise.
    embedding_stddev: likewise.
    compute_dtype: likewise.
    remat: likewise.
    attention: likewise.

  Raises:
    ValueError: the file describes another architecture, or lacks a size.
  """
  for name, expected in (('model_type', 'llama'), ('hidden_act', 'silu')):
    if values.get(name, expected) != expected:
      raise ValueError(
        f'{name}={values[name]!r} in config.json, but this decoder is a Llama '
        f'with {name}={expected!r}; use a Llama checkpoint'
      )
  for name in _SIZES.values():
    if name not in values:
      raise ValueError(f'config.json lacks {name}; add it')
  num_heads = values['num_attention_heads']
  rope_theta, rope_scaling = _rope(values)
  return decoder.DecoderConfig(
    **{ours: values[theirs] for ours, theirs in _SIZES.items()},
    num_kv_heads=_present(values, 'num_key_value_heads', num_heads),
    head_dim=_present(values, 'head_dim', values['hidden_size'] // num_heads),
    rope_theta=rope_theta,
    rope_scaling=rope_scaling,
    norm_epsilon=_present(values, 'rms_norm_eps', 1e-6),
    attention_bias=_present(values, 'attention_bias', False),
    mlp_bias=_present(values, 'mlp_bias', False),
    tie_embeddings=_present(values, 'tie_word_embeddings', False),
    initializer=initializer,
    init_scale=init_scale,
    embedding_stddev=embedding_stddev,
    compute_dtype=compute_dtype,
    remat=remat,
    attention=attention,
  )


def config_to_huggingface(
  config: decoder.DecoderConfig,
  *,
  max_position_embeddings: int,
  bos_token_id: int | None,
  eos_token_id: int | list[int] | None,
) -> dict[str, Any]:
  """Returns the `config.json` under which Hugging Face reads the weights.

  Args:
    config: of the decoder.
    max_position_embeddings: the longest sequence, in tokens.
    bos_token_id: the id that opens a sequence, if any.
    eos_token_id: the id or ids that end one, if any.
  """
  scaling = config.rope_scaling
  return {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'hidden_act': 'silu',
    **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'rope_theta': config.rope_theta,
    'rope_scaling': None
    if scaling is None
    else {
      'rope_type': 'llama3',
      **{theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()},
    },
    'rms_norm_eps': config.norm_epsilon,
    'attention_bias': config.attention_bias,
    'mlp_bias': config.mlp_bias,
    'tie_word_embeddings': config.tie_embeddings,
    'max_position_embeddings': max_position_embeddings,
    'bos_token_id': bos_token_id,
    'eos_token_id': eos_token_id,
    'torch_dtype': 'float32',
  }


def _rows(
  config: decoder.DecoderConfig,
) -> Iterator[tuple[_Row, tuple[int, ...]]]:
  """Yields the rows of the parameters this config has, with our shapes."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  # Weights are converted on machines without a GPU too.
  model = decoder.Decoder(dataclasses.replace(config, attention='xla'))
  tree = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens, tokens)
  leaves = _flatten(tree['params'])
  unnamed = sorted(set(leaves) - {row.path for row in _TABLE})
  assert not unnamed, f'the name table lacks {unnamed}'
  for row in _TABLE:
    if row.path in leaves:
      yield row, leaves[row.path].shape


def _tensors(
  row: _Row, leaf: Any, config: decoder.DecoderConfig
) -> dict[str, np.ndarray]:
  leaf = np.asarray(leaf).astype(np.float32)
  parts = leaf if _is_stacked(row) else [leaf]
  # safetensors writes memory as it lies, so a transposed view must be copied; a
  # copy also leaves the caller's array alone.
  return {
    name: np.array(part.T if row.is_transposed else part, order='C')
    for name, part in zip(_names(row, config), parts, strict=True)
  }


def _is_stacked(row: _Row) -> bool:
  return '{layer}' in row.name


def _names(row: _Row, config: decoder.DecoderConfig) -> list[str]:
  if not _is_stacked(row):
    return [row.name]
  return [row.name.format(layer=layer) for layer in range(config.num_layers)]


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {'/'.join(key.key for key in path): leaf for path, leaf in leaves}


def _insert(params: dict[str, Any], path: str, leaf: np.ndarray) -> None:
  *parents, last = path.split('/')
  for parent in parents:
    params = params.setdefault(parent, {})
  params[last] = leaf


def _check_unread(
  unread: dict[str, np.ndarray],
  params: Mapping[str, Any],
  config: decoder.DecoderConfig,
) -> None:
  unread = {k: v for k, v in unread.items() if not k.endswith(_DERIVED_SUFFIX)}
  if config.tie_embeddings and 'lm_head.weight' in unread:
    # Some writers store a tied head a second time.
    head = np.asarray(unread.pop('lm_head.weight')).astype(np.float32)
    if not np.array_equal(head, params['embed']['embedding']):
      raise ValueError(
        'lm_head.weight differs from model.embed_tokens.weight, but the config '
        'ties them; set tie_embeddings=False'
      )
  if unread:
    raise ValueError(
      f'the config has no place for tensor {", ".join(sorted(unread))}; check '
      'num_layers, attention_bias, mlp_bias and tie_embeddings'
    )


def _present(values: Mapping[str, Any], name: str, otherwise: Any) -> Any:
  """Returns the value, or Hugging Face's where it is left out or null."""
  value = values.get(name)
  return otherwise if value is None else value


def _rope(
  values: Mapping[str, Any],
) -> tuple[float, layers.RopeScaling | None]:
  """Returns the base of the wavelengths and their scaling.

  transformers 5 keeps both in `rope_parameters`; 4 has the keys `rope_theta`
  and `rope_scaling`.
  """
  parameters = _present(values, 'rope_parameters', {})
  theta = _present(parameters, 'rope_theta', values.get('rope_theta'))
  scaling = parameters or _present(values, 'rope_scaling', {})
  # Before "rope_type" the key was called "type".
  rope_type = scaling.get('rope_type', scaling.get('type', 'default'))
  theta = 10000.0 if theta is None else theta
  if rope_type == 'default':
    return theta, None
  if rope_type != 'llama3':
    raise ValueError(
      f'rope_type={rope_type!r} in config.json is not supported; use a '
      "checkpoint with 'default' or 'llama3'"
    )
  for theirs in _SCALING.values():
    if theirs not in scaling:
      raise ValueError(
        f'the rope scaling in config.json lacks {theirs}; add it'
      )
  return theta, layers.RopeScaling(
    **{ours: scaling[theirs] for ours, theirs in _SCALING.items()}
  )
