"""Writes llama_logits.npz: what Hugging Face computes for tiny Llamas.

  pip install torch transformers
  python tests/testdata/make_llama_logits.py

For every config the file holds its config.json, the names and shapes of the
tensors, the token ids and the logits. The weights are not in it: `weights`
makes the same bits of them anywhere, and a checksum in the file says so.
"""

import copy
import json
import pathlib
import zlib

import numpy as np

SEED = 20260
LENGTH = 24
PATH = pathlib.Path(__file__).with_name('llama_logits.npz')

_BASE = {
  'model_type': 'llama',
  'hidden_act': 'silu',
  'vocab_size': 64,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 4,
  'max_position_embeddings': 512,
  'rms_norm_eps': 1e-5,
  'rope_theta': 10000.0,
  'tie_word_embeddings': False,
}
CONFIGS = {
  'plain': _BASE,
  'grouped': {**_BASE, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-2},
  'biased': {**_BASE, 'attention_bias': True, 'mlp_bias': True},
  'tied': {**_BASE, 'num_key_value_heads': 1, 'tie_word_embeddings': True},
  # Heads of another size than 32 / 4, and pairs that turn more than 4, between
  # 1 and 4, and less than once within 64 tokens: all cases of the scaling.
  'scaled': {
    **_BASE,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'rope_theta': 5000.0,
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 64,
    },
  },
}


def weights(seed: int, shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
  """Returns float32 tensors whose bits depend on nothing but the arguments.

  They are multiples of 2^-16, made from integers of numpy's frozen legacy
  generator, so no rounding or logarithm enters.

  Args:
    seed: of all tensors.
    shapes: by name, in Hugging Face's layout.
  """
  tensors = {}
  for name, shape in shapes.items():
    generator = np.random.RandomState(seed ^ zlib.crc32(name.encode()))
    integers = generator.randint(-(2**15), 2**15, size=shape, dtype=np.int64)
    values = integers.astype(np.float32) / np.float32(2**16)
    tensors[name] = values + np.float32(1.0) if 'norm' in name else values
  return tensors


def checksum(tensors: dict[str, np.ndarray]) -> int:
  """Returns a checksum of all bits, in the order of the names."""
  total = 0
  for name in sorted(tensors):
    total = zlib.crc32(tensors[name].tobytes(), total)
  return total


def transformers_model(config: dict):
  """Returns transformers' model of a config.json, in float32."""
  import transformers

  # transformers writes into the dictionaries it is given.
  llama_config = transformers.LlamaConfig(**copy.deepcopy(config))
  model = transformers.LlamaForCausalLM._from_config(
    llama_config, attn_implementation='eager'
  )
  return model.float().eval()


def transformers_logits(model, tensors, tokens: np.ndarray) -> np.ndarray:
  """Returns the logits `[B, L, V]` of a transformers model with these weights.

  Args:
    model: of `transformers_model`; its weights are overwritten.
    tensors: the weights by name, all but a tied head.
    tokens: `[B, L]`.
  """
  import torch

  state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
  if model.config.tie_word_embeddings:
    state['lm_head.weight'] = state['model.embed_tokens.weight']
  model.load_state_dict(state, strict=True)
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.numpy()


def main() -> None:
  import torch
  import transformers

  versions = {
    'numpy': np.__version__,
    'torch': torch.__version__,
    'transformers': transformers.__version__,
  }
  arrays = {'versions': np.array(json.dumps(versions)), 'seed': np.array(SEED)}
  for name, config in CONFIGS.items():
    model = transformers_model(config)
    shapes = {k: list(v.shape) for k, v in model.named_parameters()}
    tensors = weights(SEED, shapes)
    tokens = np.random.RandomState(SEED).randint(
      config['vocab_size'], size=(2, LENGTH), dtype=np.int64
    )
    arrays |= {
      f'{name}/config': np.array(json.dumps(config)),
      f'{name}/shapes': np.array(json.dumps(shapes)),
      f'{name}/checksum': np.array(checksum(tensors)),
      f'{name}/tokens': tokens,
      f'{name}/logits': transformers_logits(model, tensors, tokens),
    }
  np.savez_compressed(PATH, **arrays)
  print(f'{PATH}: {PATH.stat().st_size} bytes, {versions}')


if __name__ == '__main__':
  main()
