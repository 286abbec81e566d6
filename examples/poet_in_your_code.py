"""POET in a plain optax loop; needs jax, optax and `jaxllm.poet` only."""

import jax
import jax.numpy as jnp
import optax

from jaxllm.poet import poet

keys = jax.random.split(jax.random.key(0), 4)
params = {
  'input': jax.random.normal(keys[0], (2, 64)),
  'hidden': jax.random.normal(keys[1], (64, 64)) / 8,
  'output': jax.random.normal(keys[2], (64,)) / 8,
}
turn = poet(optax.adam(1e-3, eps=1e-6), block_size=32, merge_every=100)
labels = {'input': 'adam', 'hidden': 'turn', 'output': 'adam'}
tx = optax.partition({'turn': turn, 'adam': optax.adam(1e-3)}, labels)
x = jax.random.uniform(keys[3], (512, 2), minval=-3, maxval=3)
y = jnp.sin(x[:, 0]) * jnp.cos(x[:, 1])


@jax.jit
def step(params, state):
  def loss(params):
    hidden = jnp.tanh(jnp.tanh(x @ params['input']) @ params['hidden'])
    return jnp.mean((hidden @ params['output'] - y) ** 2)

  value, gradients = jax.value_and_grad(loss)(params)
  updates, state = tx.update(gradients, state, params)
  return optax.apply_updates(params, updates), state, value


before, state = jnp.linalg.svd(params['hidden'])[1], tx.init(params)
for i in range(2001):
  params, state, value = step(params, state)
  if i % 500 == 0:
    after = jnp.linalg.svd(params['hidden'])[1]
    drift = jnp.max(jnp.abs(after / before - 1))
    print(f'step {i:4}  loss {value:.5f}  spectrum drift {drift:.4%}')
