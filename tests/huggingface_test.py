"""The decoder computes what Hugging Face's does; names convert both ways."""

import dataclasses
import importlib.util
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import huggingface
from jaxllm.model import decoder
from jaxllm.model import layers

_SCRIPT = pathlib.Path(__file__).parent / 'testdata' / 'make_llama_logits.py'
_TRAINING = {
  'initializer': 'standard',
  'init_scale': 0.3,
  'embedding_stddev': 0.3,
  'compute_dtype': 'float32',
  'remat': 'none',
  'attention': 'xla',
}


def _load_golden():
  spec = importlib.util.spec_from_file_location('make_llama_logits', _SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


golden = _load_golden()
_ALL = list(golden.CONFIGS)


@pytest.fixture(scope='module')
def stored():
  with np.load(golden.PATH) as file:
    return dict(file)


def _config(name):
  return huggingface.config_from_huggingface(golden.CONFIGS[name], **_TRAINING)


def _tensors(stored, name, seed=golden.SEED):
  return golden.weights(seed, json.loads(str(stored[f'{name}/shapes'])))


def _logits(config, params, tokens):
  tokens = jnp.asarray(tokens, jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  # Compiling takes longer than these tiny models run.
  options = {'xla_backend_optimization_level': 0}
  apply = jax.jit(decoder.Decoder(config).apply, compiler_options=options)
  return apply({'params': params}, tokens, positions, jnp.ones_like(tokens))[0]


@pytest.mark.parametrize('name', _ALL)
def test_logits_equal_stored_huggingface_logits(stored, name):
  assert json.loads(str(stored[f'{name}/config'])) == golden.CONFIGS[name]
  tensors = _tensors(stored, name)
  assert golden.checksum(tensors) == stored[f'{name}/checksum']
  config = _config(name)
  params = huggingface.from_huggingface(tensors, config)
  logits = _logits(config, params, stored[f'{name}/tokens'])
  expected = stored[f'{name}/logits']
  # The comparison means something only if the logits are no constant.
  assert expected.std() > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', _ALL)
@pytest.mark.filterwarnings('ignore')  # torch's and transformers' own
def test_export_runs_in_transformers(stored, name):
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  config = _config(name)
  params = huggingface.from_huggingface(_tensors(stored, name, seed=7), config)
  exported = huggingface.config_to_huggingface(
    config, max_position_embeddings=512, bos_token_id=1, eos_token_id=2
  )
  tokens = np.random.RandomState(7).randint(64, size=(3, 17))
  expected = golden.transformers_logits(
    golden.transformers_model(exported),
    huggingface.to_huggingface(params, config),
    tokens,
  )
  logits = _logits(config, params, tokens)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', _ALL)
def test_weights_survive_the_round_trip(stored, name):
  config = _config(name)
  tensors = _tensors(stored, name)
  params = huggingface.from_huggingface(tensors, config)
  back = huggingface.to_huggingface(params, config)
  chex.assert_trees_all_equal(back, tensors)
  assert all(t.flags.c_contiguous and t.flags.owndata for t in back.values())
  tokens = jnp.zeros((1, 1), jnp.int32)
  model = decoder.Decoder(config)
  init = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens, tokens)
  chex.assert_trees_all_equal_shapes_and_dtypes(params, init['params'])


@pytest.mark.parametrize('name', _ALL)
def test_config_survives_the_round_trip(name):
  config = _config(name)
  exported = huggingface.config_to_huggingface(
    config, max_position_embeddings=512, bos_token_id=1, eos_token_id=2
  )
  exported = json.loads(json.dumps(exported))
  assert huggingface.config_from_huggingface(exported, **_TRAINING) == config


def test_a_config_for_the_gpu_converts_without_one(stored):
  config = dataclasses.replace(
    _config('plain'), attention='cudnn', compute_dtype='bfloat16'
  )
  tensors = _tensors(stored, 'plain')
  params = huggingface.from_huggingface(tensors, config)
  chex.assert_trees_all_equal(
    huggingface.to_huggingface(params, config), tensors
  )


def test_bfloat16_tensors_become_float32(stored):
  tensors = _tensors(stored, 'plain')
  halves = {name: t.astype(jnp.bfloat16) for name, t in tensors.items()}
  params = huggingface.from_huggingface(halves, _config('plain'))
  embedding = params['embed']['embedding']
  assert embedding.dtype == np.float32
  np.testing.assert_array_equal(
    embedding, halves['model.embed_tokens.weight'].astype(np.float32)
  )


@pytest.mark.parametrize(
  'missing', ['model.norm.weight', 'model.layers.1.mlp.up_proj.weight']
)
def test_missing_tensor_is_named(stored, missing):
  tensors = _tensors(stored, 'plain')
  del tensors[missing]
  with pytest.raises(ValueError, match=f'no tensor {missing}'):
    huggingface.from_huggingface(tensors, _config('plain'))


@pytest.mark.parametrize(
  'unknown',
  [
    'model.layers.2.mlp.up_proj.weight',  # one layer more than the config has
    'model.layers.0.self_attn.q_proj.bias',  # biases the config denies
    'score.weight',
  ],
)
def test_unknown_tensor_is_named(stored, unknown):
  tensors = {**_tensors(stored, 'plain'), unknown: np.zeros(32, np.float32)}
  with pytest.raises(ValueError, match=f'no place for tensor {unknown}'):
    huggingface.from_huggingface(tensors, _config('plain'))


@pytest.mark.parametrize('shape', [(32, 48), (48,), (64, 32), (2, 48, 32)])
def test_wrong_shape_is_named(stored, shape):
  name = 'model.layers.0.mlp.up_proj.weight'  # [48, 32]
  tensors = {**_tensors(stored, 'plain'), name: np.zeros(shape, np.float32)}
  with pytest.raises(ValueError, match=f'{name} has shape'):
    huggingface.from_huggingface(tensors, _config('plain'))


def test_old_rotary_buffers_are_left_aside(stored):
  tensors = _tensors(stored, 'plain')
  expected = huggingface.from_huggingface(tensors, _config('plain'))
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(4)
  params = huggingface.from_huggingface(tensors, _config('plain'))
  chex.assert_trees_all_equal(params, expected)


def test_a_tied_head_may_be_stored_but_not_differ(stored):
  tensors = _tensors(stored, 'tied')
  embedding = tensors['model.embed_tokens.weight']
  config = _config('tied')
  params = huggingface.from_huggingface(
    {**tensors, 'lm_head.weight': embedding}, config
  )
  assert 'lm_head' not in params
  with pytest.raises(ValueError, match='set tie_embeddings=False'):
    huggingface.from_huggingface(
      {**tensors, 'lm_head.weight': embedding + 1}, config
    )


def test_export_refuses_other_parameters(stored):
  config = _config('plain')
  params = huggingface.from_huggingface(_tensors(stored, 'plain'), config)
  with pytest.raises(ValueError, match='knows no parameter extra/scale'):
    huggingface.to_huggingface(
      {**params, 'extra': {'scale': np.ones(1)}}, config
    )
  with pytest.raises(ValueError, match='final_norm/scale has shape'):
    huggingface.to_huggingface(
      {**params, 'final_norm': {'scale': np.ones(1)}}, config
    )
  del params['final_norm']
  with pytest.raises(ValueError, match='lack final_norm/scale'):
    huggingface.to_huggingface(params, config)


def test_config_reads_both_spellings_of_rope():
  values = dict(golden.CONFIGS['scaled'])
  expected = huggingface.config_from_huggingface(values, **_TRAINING)
  assert expected.rope_theta == 5000.0
  assert expected.rope_scaling == layers.RopeScaling(8.0, 1.0, 4.0, 64)
  theta, scaling = values.pop('rope_theta'), values.pop('rope_scaling')
  values['rope_parameters'] = {'rope_theta': theta, **scaling}
  config = huggingface.config_from_huggingface(values, **_TRAINING)
  assert config == expected


def test_config_fills_what_huggingface_leaves_out():
  sizes = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
  }
  config = huggingface.config_from_huggingface(sizes, **_TRAINING)
  assert config.num_kv_heads == 4
  assert config.head_dim == 8
  assert config.rope_theta == 10000.0
  assert config.norm_epsilon == 1e-6
  del sizes['vocab_size']
  with pytest.raises(ValueError, match='lacks vocab_size'):
    huggingface.config_from_huggingface(sizes, **_TRAINING)


@pytest.mark.parametrize(
  'change',
  [
    {'model_type': 'gpt2'},
    {'hidden_act': 'gelu'},
    {'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0}},
    {'rope_scaling': {'rope_type': 'llama3', 'factor': 2.0}},
  ],
)
def test_config_refuses_other_architectures(change):
  with pytest.raises(ValueError, match=r'gpt2|gelu|yarn|lacks low_freq_factor'):
    huggingface.config_from_huggingface(
      {**golden.CONFIGS['plain'], **change}, **_TRAINING
    )
