"""The same numbers on every mesh, and meshes that cannot work."""

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from jaxllm import batch as batch_lib
from jaxllm import sharding
from jaxllm.model import decoder
from jaxllm.train import objectives
from jaxllm.train import optimizers
from jaxllm.train import step as step_lib

_STEPS = 50
_MODEL = decoder.DecoderConfig(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=64,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  rope_scaling=None,
  norm_epsilon=1e-6,
  attention_bias=True,
  mlp_bias=True,
  tie_embeddings=False,
  initializer='normalized',
  init_scale=1.0,
  embedding_stddev=0.02,
  compute_dtype='float32',
  remat='none',
  attention='xla',
)


def _optimizer(name: str) -> optimizers.Optimizer:
  poet = optimizers.PoetConfig(
    inner='adam',
    learning_rate=5e-3,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-6,
    alternate_sides=False,
    clip_norm=1.0,
    clip_ramp_steps=0,
    block_size=4,
    fraction=0.0,
    neumann_terms=3,
    merge_every=20,
    resample_every=1,
    reset_inner=True,
    partitions=4,
    seed=0,
  )
  config = optimizers.OptimizerConfig(
    name=name,
    warmup_steps=5,
    final_fraction=0.1,
    adamw=optimizers.AdamWConfig(3e-3, 0.9, 0.95, 1e-6, 0.1, 1.0),
    muon=optimizers.MuonConfig(1e-2, 0.95, 0.1),
    poet=poet,
  )
  return optimizers.build(config, _STEPS)


def _batches():
  """Rows of a random walk, so that there is something to learn."""
  rng = np.random.default_rng(0)
  for _ in range(_STEPS):
    steps = rng.integers(1, 4, (8, 17), dtype=np.int32)
    tokens = (np.cumsum(steps, axis=1) % 64).astype(np.int32)
    yield batch_lib.shift(tokens, np.ones_like(tokens))


@functools.cache
def _losses(name: str, data: int, fsdp: int, tensor: int) -> list[float]:
  """Loss of every step on a mesh of the first devices."""
  count = data * fsdp * tensor
  config = sharding.MeshConfig(data, fsdp, tensor)
  mesh = sharding.make_mesh(config, jax.devices()[:count])
  model, optimizer = decoder.Decoder(_MODEL), _optimizer(name)

  def initial():
    row = jnp.zeros((1, 4), jnp.int32)
    params = model.init(jax.random.key(0), row, row, row)['params']
    return step_lib.init_state(params, optimizer, 0)

  def loss(params, batch, key):
    del key
    return objectives.next_token_loss(model, params, batch, 128)

  with jax.set_mesh(mesh):
    places = sharding.state_shardings(jax.eval_shape(initial), mesh)
    state = jax.jit(initial, out_shardings=places)()
    step = jax.jit(
      functools.partial(
        step_lib.train_step,
        loss_function=loss,
        optimizer=optimizer,
        microbatches=1,
      ),
      donate_argnums=0,
      out_shardings=(places, None),
    )
    losses = []
    for batch in _batches():
      batch = jax.device_put(batch, sharding.batch_sharding(mesh))
      state, metrics = step(state, batch)
      losses.append(float(metrics['loss']))
    assert step._cache_size() == 1
    kernel = state.params['layers']['mlp']['up_proj']['kernel']
    share = kernel.addressable_shards[0].data.size / kernel.size
    assert share == 1 / (fsdp * tensor)
  return losses


@pytest.mark.parametrize(
  ('name', 'mesh'),
  [
    ('adamw', (8, 1, 1)),
    ('adamw', (2, 2, 2)),
    ('poet', (8, 1, 1)),
    ('poet', (2, 4, 1)),
    ('poet', (2, 2, 2)),
  ],
)
def test_eight_devices_have_the_losses_of_one(name, mesh):
  one = _losses(name, 1, 1, 1)
  assert one[-1] < 0.8 * one[0]
  np.testing.assert_allclose(_losses(name, *mesh), one, rtol=1e-5)


def test_what_an_optimizer_keeps_lies_where_its_parameter_does():
  mesh = sharding.make_mesh(sharding.MeshConfig(2, 2, 2), jax.devices())
  row = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  params = jax.eval_shape(
    lambda r: decoder.Decoder(_MODEL).init(jax.random.key(0), r, r, r), row
  )['params']
  state = jax.eval_shape(
    lambda p: step_lib.init_state(p, _optimizer('poet'), 0), params
  )
  places = sharding.state_shardings(state, mesh)
  poet = places.opt_state.inner_states['poet'].inner_state
  down = poet.w0['layers']['mlp']['down_proj']['kernel']
  assert down.spec == PartitionSpec(None, 'tensor', 'fsdp')
  moments = poet.inner[1].mu['layers']['mlp']['down_proj']['kernel']
  assert moments.left.spec == PartitionSpec(None, 'tensor')
  assert moments.right.spec == PartitionSpec(None, 'fsdp')
  norms = poet.norms['layers']['mlp']['down_proj']['kernel']
  assert norms.weight.spec == PartitionSpec(None)
  chex.assert_trees_all_equal_structs(places, state)


def test_a_parameter_without_a_place_is_an_error():
  mesh = sharding.make_mesh(sharding.MeshConfig(-1, 1, 1), jax.devices())
  leaf = jax.ShapeDtypeStruct((2, 4), jnp.float32)
  for tree, message in (
    ({'layers': {'adapter': leaf}}, 'no place for layers/adapter'),
    ({'opt_state': {'table': leaf}}, 'opt_state/table belongs to no parameter'),
  ):
    with pytest.raises(ValueError, match=message):
      sharding.state_shardings(tree, mesh)


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ((0, 1, 1), 'data=0.*1 or more'),
    ((-1, -1, 1), 'at most one'),
    ((3, 1, 1), 'data=3, fsdp=1, tensor=1 does not fit 8 devices'),
    ((-1, 3, 1), 'fsdp=3.*does not fit 8 devices'),
  ],
)
def test_meshes_that_do_not_fit_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(sharding.MeshConfig(*sizes), jax.devices())


def test_what_does_not_divide_is_refused_by_name():
  mesh = sharding.make_mesh(sharding.MeshConfig(-1, 1, 4), jax.devices())
  with pytest.raises(ValueError, match=r'batch_size=3 rows.*= 2'):
    sharding.check_batch(3, mesh, 'train.batch_size')
  with pytest.raises(ValueError, match=r'partitions=2.*set it to 4'):
    sharding.check_partitions(2, mesh)
  leaf = jax.ShapeDtypeStruct((2, 8, 6), jnp.float32)
  with pytest.raises(ValueError, match=r'up_proj.*\(2, 8, 6\).*into 4'):
    sharding.state_shardings(
      {'layers': {'mlp': {'up_proj': {'kernel': leaf}}}}, mesh
    )
