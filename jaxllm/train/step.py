"""One optimizer step as a pure function of arrays."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from jaxllm import batch as batch_lib
from jaxllm.train import objectives
from jaxllm.train import optimizers

# (params, batch, key) -> Loss
LossFunction = Callable[[Any, batch_lib.Batch, Array], objectives.Loss]


class TrainState(NamedTuple):
  """Everything that training changes; a checkpoint is this and a position.

  Attributes:
    step: optimizer steps done, int32 scalar.
    params: the weights, float32.
    opt_state: of the optimizer's transform.
    key: random key data of the run, uint32; step n uses fold_in(key, n).
  """

  step: Array
  params: Any
  opt_state: Any
  key: Array


def init_state(
  params: Any, optimizer: optimizers.Optimizer, seed: int
) -> TrainState:
  """State before the first step."""
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    params=params,
    opt_state=optimizer.transform.init(params),
    key=jax.random.key_data(jax.random.key(seed)),
  )


def train_step(
  state: TrainState,
  batch: batch_lib.Batch,
  *,
  loss_function: LossFunction,
  optimizer: optimizers.Optimizer,
  microbatches: int,
) -> tuple[TrainState, dict[str, Array]]:
  """One step: gradient of the batch's mean loss, update, metrics.

  Losses and gradients of the microbatches are summed and divided once by the
  summed weight, so their number changes nothing but memory and rounding, also
  when they hold different numbers of tokens.

  Args:
    state: donate it when jitting.
    batch: arrays `[B, ...]`; B is a multiple of `microbatches`.
    loss_function: see `LossFunction`.
    optimizer: see `optimizers.build`.
    microbatches: how many parts of the batch to go through in turn.

  Returns:
    The next state, and float32 scalars: `loss` (nats per token), `tokens`
    (targets counted), `grad_norm` (before clipping), `param_norm` (of the new
    weights), learning rates and POET's readings.
  """
  key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
  loss, gradients = loss_and_gradients(
    state.params, batch, key, loss_function, microbatches
  )
  updates, opt_state = optimizer.transform.update(
    gradients, state.opt_state, state.params, as_weights=True
  )
  params = optimizer.assign(state.params, updates)
  metrics = {
    'loss': loss.sum / jnp.maximum(loss.weight, 1.0),
    'tokens': loss.weight,
    'grad_norm': optax.tree.norm(gradients),
    'param_norm': optax.tree.norm(params),
    **{
      name: jnp.asarray(schedule(state.step), jnp.float32)
      for name, schedule in optimizer.schedules.items()
    },
    **optimizer.readings(opt_state),
  }
  return TrainState(state.step + 1, params, opt_state, state.key), metrics


def loss_and_gradients(
  params: Any,
  batch: batch_lib.Batch,
  key: Array,
  loss_function: LossFunction,
  microbatches: int,
) -> tuple[objectives.Loss, Any]:
  """Summed loss and weight, and the gradient of their quotient.

  Microbatch i of 2 holds rows i, i + 2, i + 4, ... of the batch, so that rows
  that devices share out contiguously stay where they are.
  """

  def summed(params: Any, part: batch_lib.Batch, key: Array):
    loss = loss_function(params, part, key)
    return loss.sum, loss

  gradient = jax.grad(summed, has_aux=True)
  if microbatches == 1:
    gradients, loss = gradient(params, batch, key)
  else:

    def add(total, part):
      index, part = part
      new = gradient(params, part, jax.random.fold_in(key, index))
      return jax.tree.map(jnp.add, total, new), ()

    zero = jnp.zeros([], jnp.float32)
    start = jax.tree.map(jnp.zeros_like, params), objectives.Loss(zero, zero)
    parts = jax.tree.map(
      lambda x: jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1),
      batch,
    )
    (gradients, loss), _ = jax.lax.scan(
      add, start, (jnp.arange(microbatches), parts)
    )
  weight = jnp.maximum(loss.weight, 1.0)
  return loss, jax.tree.map(lambda g: g / weight.astype(g.dtype), gradients)
