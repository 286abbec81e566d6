"""Writes a plan as a table."""

import collections
from collections.abc import Sequence
import dataclasses
import math
import textwrap
from typing import Any

from jaxllm import hlo
from jaxllm.model import decoder
from jaxllm.train import devices
from jaxllm.train import prediction
from launch.worker import run_settings

# Transfers that take less than this share of the time are told together.
_SMALL = 1e-3


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a training step needs, on one device, and the seconds it takes.

  Attributes:
    needs: bytes by the shapes of the arrays.
    compiled: the CPU compiler's `memory_analysis()`.
    num_parameters: of the whole model.
    products: of one device.
    transfers: by axes and kind, what one device sends.
    times: of one step.
    compiled_data: length of the data axis that was compiled for.
  """

  needs: prediction.Bytes
  compiled: Any
  num_parameters: int
  products: Sequence[hlo.Product]
  transfers: dict[tuple[tuple[str, ...], str], prediction.Transfer]
  times: prediction.Times
  compiled_data: int


def text(
  name: str,
  device: str,
  settings: run_settings.RunSettings,
  gpu: devices.Gpu,
  plan: Plan,
) -> str:
  """The whole report, for a terminal of 80 columns."""
  parts = [
    _heading(name, device, settings, gpu, plan),
    _memory(gpu, plan),
    _flops(settings, plan),
    _transfers(plan),
    _time(settings, gpu, plan),
    textwrap.fill(_assumptions(settings, gpu, plan), 80),
  ]
  return '\n\n'.join(parts)


def model_flops(settings: run_settings.RunSettings) -> float:
  """FLOPs of a step on one device, as MFU counts them."""
  length = settings.data.sequence_length
  per_token = decoder.flops_per_token(settings.model, length)
  tokens = length * settings.train.batch_size
  return per_token * tokens / _num_devices(settings)


def utilization(
  settings: run_settings.RunSettings, gpu: devices.Gpu, seconds: float
) -> float:
  """MFU of a step of so many seconds."""
  return model_flops(settings) / (gpu.bfloat16_flops * seconds)


def _heading(
  name: str,
  device: str,
  settings: run_settings.RunSettings,
  gpu: devices.Gpu,
  plan: Plan,
) -> str:
  train, mesh = settings.train, settings.mesh
  length = settings.data.sequence_length
  rows = train.batch_size // (train.microbatches * mesh.data * mesh.fsdp)
  optimizer = settings.optimizer.name
  if optimizer == 'poet':
    poet = settings.optimizer.poet
    optimizer += f', b = {poet.block_size}, partitions = {poet.partitions}'
  count = _num_devices(settings)
  millions = plan.num_parameters / 1e6
  return '\n'.join(
    [
      f'model   {name}, {millions:,.1f}M parameters; {optimizer}',
      f'mesh    data={mesh.data} fsdp={mesh.fsdp} tensor={mesh.tensor}:'
      f' {count:,} {device}, {gpu.gpus_per_node} in a node',
      f'step    {train.batch_size:,} rows of {length},'
      f' {train.batch_size * length:,} tokens; microbatches:'
      f' {train.microbatches} of {rows} rows per device',
    ]
  )


def _memory(gpu: devices.Gpu, plan: Plan) -> str:
  needs, compiled = plan.needs, plan.compiled
  share = sum(needs) / gpu.memory_bytes
  rows = [
    ('parameters', needs.parameters, ''),
    ('optimizer', needs.optimizer, ''),
    ('gradients', needs.gradients, ''),
    ('new matrices', needs.update, ''),
    ('activations', needs.activations, 'of a microbatch, with logits'),
    ('together', sum(needs), f'{share:.0%} of {gpu.memory_bytes / 1e9:.0f} GB'),
    ('arguments', compiled.argument_size_in_bytes, 'compiled: state and batch'),
    ('outputs', compiled.output_size_in_bytes, 'compiled'),
    ('aliased', compiled.alias_size_in_bytes, 'compiled: outputs in place'),
    ('work space', compiled.temp_size_in_bytes, 'compiled for CPU, in float32'),
  ]
  return '\n'.join(
    [f'{"on a device":30}{"GB":>10}']
    + [
      f'  {label:28}{size / 1e9:10.3f}  {note}'.rstrip()
      for label, size, note in rows
    ]
  )


def _flops(settings: run_settings.RunSettings, plan: Plan) -> str:
  found = collections.Counter()
  for product in plan.products:
    kind = product.dtype
    if product.precision != 'default':
      kind += f' {product.precision}'
    found[kind] += product.flops * product.times
  rows = [('of the model, as in MFU', model_flops(settings))]
  rows += [(f'products in {kind}', n) for kind, n in found.most_common()]
  return '\n'.join(
    [f'{"on a device":30}{"TFLOP":>10}']
    + [f'  {label:28}{flops / 1e12:10.3f}' for label, flops in rows]
  )


def _transfers(plan: Plan) -> str:
  least = _SMALL * plan.times.transfers
  large = {k: t for k, t in plan.transfers.items() if t.seconds >= least}
  small = [t for t in plan.transfers.values() if t.seconds < least]
  ordered = sorted(large.items(), key=lambda item: -item[1].seconds)
  rows = [
    (f'{"+".join(axes)} {kind}', [each]) for (axes, kind), each in ordered
  ]
  rows.append(('others', small))
  rows.append(('together', list(plan.transfers.values())))
  lines = [f'{"sent by a device":30}{"GB":>10}{"calls":>8}{"s":>9}']
  for label, group in rows:
    sent = math.fsum(each.wire_bytes for each in group)
    calls = sum(each.calls for each in group)
    seconds = math.fsum(each.seconds for each in group)
    place = (
      'inside nodes' if all(each.is_local for each in group) else 'network'
    )
    if label != 'others' or group:
      lines.append(
        f'  {label:28}{sent / 1e9:10.3f}{calls:8,}{seconds:9.4f}  {place}'
      )
  return '\n'.join(lines)


def _time(
  settings: run_settings.RunSettings, gpu: devices.Gpu, plan: Plan
) -> str:
  times = plan.times
  tokens = settings.train.batch_size * settings.data.sequence_length
  lines = [
    f'{"a step":30}{"s":>10}',
    f'  {"products":28}{times.products:10.4f}',
    f'  {"optimizer":28}{times.optimizer:10.4f}',
    f'  {"transfers":28}{times.transfers:10.4f}',
  ]
  for label, seconds in (
    ('all, transfers overlapped', times.overlapped),
    ('all, one after the other', times.in_turn),
  ):
    lines.append(
      f'  {label:28}{seconds:10.4f}  MFU'
      f' {utilization(settings, gpu, seconds):.1%},'
      f' {tokens / seconds:,.0f} tokens/s'
    )
  return '\n'.join(lines)


def _assumptions(
  settings: run_settings.RunSettings, gpu: devices.Gpu, plan: Plan
) -> str:
  flops = '/'.join(
    f'{each / 1e12:.0f}'
    for each in (
      gpu.bfloat16_flops,
      gpu.tensorfloat32_flops,
      gpu.float32_flops,
    )
  )
  line = (
    f'Assumed, not measured: products at {gpu.achievable_flops:.0%} of {flops}'
    ' TFLOP/s (bf16, f32, f32 at highest precision); memory of'
    f' {gpu.memory_bandwidth / 1e12:.2f} TB/s, links of'
    f' {gpu.link_bandwidth / 1e9:.0f} and network of'
    f' {gpu.network_bandwidth / 1e9:.0f} GB/s per GPU at'
    f' {gpu.achievable_bandwidth:.0%}; rings; no latency, no failures.'
  )
  if plan.compiled_data < settings.mesh.data:
    line += (
      f' Compiled for data={plan.compiled_data}, stretched to'
      f' {settings.mesh.data}.'
    )
  return line


def _num_devices(settings: run_settings.RunSettings) -> int:
  return math.prod(dataclasses.astuple(settings.mesh))
