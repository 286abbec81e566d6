"""What a training step should need on devices that are not here.

Three parts, each a bound: products at a share of the peak, the optimizer at a
share of the memory's bandwidth, transfers at a share of their link's. Products
and transfers overlap somewhere between entirely and not at all; the optimizer
comes after both. Not modelled: latencies, what is neither a product nor the
optimizer (norms, softmax; they count as part of the share of the peak), input
and checkpoints, and devices that are slow or fail.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import batch as batch_lib
from jaxllm import hlo
from jaxllm.model import decoder
from jaxllm.train import devices
from jaxllm.train import objectives

# Times that POET's update reads or writes its matrices beyond W and W0 at rest:
# the base and the gradient enter the frame, three products lead the gradient
# back; the base enters again, two products turn it, and it leaves: ten passes,
# each reading and writing once.
_POET_ACCESSES = 20


class Bytes(NamedTuple):
  """Bytes on one device.

  Attributes:
    parameters: the weights.
    optimizer: its state.
    gradients: with microbatches their sum, too.
    update: the matrices that POET makes before the old ones can go.
    activations: what the forward pass of a microbatch keeps for the backward
      pass, and the logits of a chunk.
  """

  parameters: float
  optimizer: float
  gradients: float
  update: float
  activations: float


class Transfer(NamedTuple):
  """All transfers of one kind along the same axes, in one step.

  Attributes:
    wire_bytes: that a device sends.
    calls: how many transfers these are.
    is_local: whether they stay inside nodes.
    seconds: at the achievable bandwidth.
  """

  wire_bytes: float
  calls: int
  is_local: bool
  seconds: float


class Times(NamedTuple):
  """Seconds of a step's parts."""

  products: float
  optimizer: float
  transfers: float

  @property
  def overlapped(self) -> float:
    """Seconds of a step whose transfers hide behind products, or these."""
    return max(self.products, self.transfers) + self.optimizer

  @property
  def in_turn(self) -> float:
    """Seconds of a step that does one after the other."""
    return self.products + self.transfers + self.optimizer


def activation_bytes(
  config: decoder.DecoderConfig,
  rows: int,
  length: int,
  places: int,
  tensor: int,
) -> float:
  """Bytes that one microbatch keeps on a device, from shapes alone.

  Args:
    config: of the whole decoder.
    rows: of the microbatch, on this device.
    length: tokens of a row.
    places: tokens of each row whose logits exist at the same time.
    tensor: devices that share out heads, features and vocabulary.
  """
  vocab_size = config.vocab_size // tensor
  part = dataclasses.replace(
    config,
    vocab_size=vocab_size,
    num_heads=config.num_heads // tensor,
    num_kv_heads=max(1, config.num_kv_heads // tensor),
    intermediate_size=config.intermediate_size // tensor,
  )
  # What does not depend on the rows are weights; the difference has none.
  kept = _kept(part, 2 * rows, length, places) - _kept(
    part, rows, length, places
  )
  if places < length:  # logits of a chunk and their gradient
    kept += 2 * 4 * rows * places * vocab_size
  return float(kept)


def products_s(products: Iterable[hlo.Product], gpu: devices.Gpu) -> float:
  """Seconds for matrix products."""
  return sum(
    product.times * product.flops / (_peak(product, gpu) * gpu.achievable_flops)
    for product in products
  )


def optimizer_s(needs: Bytes, microbatches: int, gpu: devices.Gpu) -> float:
  """Seconds for the memory traffic of gradients and optimizer.

  Args:
    needs: parameters and optimizer state are read and written once, and one
      gradient is read; every microbatch adds a gradient to the sum; POET goes
      through its matrices many times.
    microbatches: how many.
    gpu: the device.
  """
  traffic = (
    2 * (needs.parameters + needs.optimizer)
    + needs.parameters
    + 3 * needs.parameters * (microbatches - 1)
    + _POET_ACCESSES * needs.update
  )
  return traffic / (gpu.memory_bandwidth * gpu.achievable_bandwidth)


def transfers(
  collectives: Iterable[hlo.Collective], gpu: devices.Gpu
) -> dict[tuple[tuple[str, ...], str], Transfer]:
  """Transfers by axes and kind."""
  found = {}
  for each in collectives:
    bandwidth, is_local = link(each.groups, gpu)
    old = found.get((each.axes, each.kind), Transfer(0.0, 0, True, 0.0))
    sent = each.times * each.wire_bytes
    found[each.axes, each.kind] = Transfer(
      old.wire_bytes + sent,
      old.calls + each.times,
      old.is_local and is_local,
      old.seconds + sent / (bandwidth * gpu.achievable_bandwidth),
    )
  return found


def link(groups: np.ndarray, gpu: devices.Gpu) -> tuple[float, bool]:
  """Bytes per second of a device in these groups, and whether inside nodes.

  Devices fill node after node. k members of a group in one node share what
  leaves it over k network adapters, so a ring has k times the bandwidth of
  one, at most that of the links.

  Args:
    groups: `[groups, n]` positions in the flattened mesh.
    gpu: the device.

  Example, 8 GPUs per node: [[0, 1]] has the link's bandwidth, [[0, 8]] one
  adapter's, [[0, 1, 8, 9]] two adapters'.
  """
  nodes = np.sort(groups // gpu.gpus_per_node, axis=1)
  distinct = 1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)
  if distinct.max() == 1:
    return gpu.link_bandwidth, True
  members = groups.shape[1] / distinct[distinct > 1].max()
  return min(gpu.link_bandwidth, members * gpu.network_bandwidth), False


def _kept(
  config: decoder.DecoderConfig, rows: int, length: int, places: int
) -> int:
  """Bytes of everything that the gradient reads of the forward pass."""
  model = decoder.Decoder(config)
  row = jax.ShapeDtypeStruct((1, length), jnp.int32)
  params = jax.eval_shape(
    lambda row: model.init(jax.random.key(0), row, row, row), row
  )['params']
  integers = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  batch = batch_lib.Batch(*[integers] * 4, integers.update(dtype=jnp.float32))

  def pull_back(params: Any, batch: batch_lib.Batch) -> Any:
    def loss(params: Any):
      return objectives.next_token_loss(model, params, batch, places * rows).sum

    return jax.vjp(loss, params)[1]

  leaves = jax.tree.leaves(jax.eval_shape(pull_back, params, batch))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _peak(product: hlo.Product, gpu: devices.Gpu) -> float:
  if product.dtype in ('bf16', 'f16'):
    return gpu.bfloat16_flops
  if product.dtype == 'f32' and product.precision == 'default':
    return gpu.tensorfloat32_flops
  return gpu.float32_flops
