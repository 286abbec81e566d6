"""Says what a run would need and take on devices that are not here.

The training step is lowered and compiled for the mesh, over devices of the CPU
backend that exist by name only; no array is made. What it computes and moves is
read from its text (`jaxllm.hlo`), how long that takes comes from a table of
devices (`jaxllm.train.devices`) and a model with three terms
(`jaxllm.train.prediction`).

XLA's CPU backend takes 2,048 devices. A larger mesh is compiled with a shorter
data axis and the same rows per device; then transfers along `data` are
stretched (`hlo.lengthened`). Nothing else depends on the length of that axis.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import math
import os
import re
import sys
from typing import Any

import jax

from jaxllm import hlo
from jaxllm import sharding
from jaxllm.model import decoder
from jaxllm.train import devices
from jaxllm.train import optimizers
from jaxllm.train import prediction
from launch.control import config_file
from launch.control import run_config
from launch.worker import partition
from launch.worker import plan_report
from launch.worker import program as program_lib
from launch.worker import run_settings

_MOST_DEVICES = 2048  # measured with jax 0.10.2: 2,056 fail
# Of a data axis to be stretched: with few rows the partitioner chooses others.
_LEAST_DATA = 8
_EXAMPLE = """\
--config.KEY=VALUE sets a key of the config, as in launch.main. The batch is the
whole mesh's: train.batch_size rows in train.microbatches parts, and logits of
train.loss_chunk_tokens tokens at once (set it to a microbatch's tokens: the
head moves once per chunk). POET wants optimizer.poet.partitions to be a
multiple of fsdp and tensor, and its block size to divide every width /
partitions. XLA's own warnings go to the standard error.

example:
  python -m launch.worker.plan --config=configs/poet_1b.py --mesh=2x4x1 \\
      --config.optimizer.poet.partitions=4 --config.optimizer.poet.block_size=64
"""


def main(argv: Sequence[str]) -> int:
  """Prints the plan that the command line asks for; returns the exit code."""
  try:
    arguments, overrides = _parse(argv[1:])
    sizes = _mesh_sizes(arguments.mesh)
    gpu = _gpu(arguments.device)
    settings = _settings(arguments.config, overrides, sizes)
    check(settings)
    _use_fake_devices(min(sizes.data, _longest_data(sizes)), sizes)
    plan = make(settings, gpu)
  except (ValueError, argparse.ArgumentError) as error:
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    return 2
  name = os.path.basename(arguments.config)
  print(plan_report.text(name, arguments.device, settings, gpu, plan))
  return 0


def make(
  settings: run_settings.RunSettings, gpu: devices.Gpu
) -> plan_report.Plan:
  """Compiles the training step and works out what it needs.

  Args:
    settings: with the mesh in full; they passed `check`. The CPU devices are as
      many as the mesh has, or has with the data axis that can be compiled.
    gpu: the device to plan for.

  Raises:
    ValueError: the mesh does not divide the arrays, or POET's blocks do not.
  """
  sizes = settings.mesh
  data = _longest_data(sizes)
  shorter = _with_data_axis(settings, data)
  program = program_lib.build(shorter, jax.devices())
  with jax.set_mesh(program.mesh):
    program_lib.check(shorter)
    compiled, text = partition.compile_and_read(
      program_lib.lower(program, shorter), program.mesh.size
    )
    state = program.state_shapes(settings.train.seed)
  mesh = dict(program.mesh.shape)
  collectives = [
    hlo.lengthened(each, mesh, 'data', sizes.data // data)
    for each in hlo.collectives(text, mesh)
  ]
  products = hlo.products(text)
  needs = _needs(shorter, state)
  transfers = prediction.transfers(collectives, gpu)
  return plan_report.Plan(
    needs=needs,
    compiled=compiled.memory_analysis(),
    num_parameters=decoder.count_parameters(state.params),
    products=products,
    transfers=transfers,
    times=prediction.Times(
      products=prediction.products_s(products, gpu),
      optimizer=prediction.optimizer_s(needs, settings.train.microbatches, gpu),
      transfers=sum(each.seconds for each in transfers.values()),
    ),
    compiled_data=data,
  )


def check(settings: run_settings.RunSettings) -> None:
  """Refuses what the mesh does not divide, by the names of the settings.

  Raises:
    ValueError: names the setting and a remedy.
  """
  sizes, train = settings.mesh, settings.train
  mesh = jax.sharding.AbstractMesh(dataclasses.astuple(sizes), sharding.AXES)
  sharding.check_batch(
    train.batch_size // train.microbatches,
    mesh,
    'train.batch_size / train.microbatches',
  )
  if settings.model.num_heads % sizes.tensor:
    raise ValueError(
      f'model.num_heads={settings.model.num_heads} do not share out over tensor'
      f' = {sizes.tensor}: choose a tensor axis that divides it'
    )
  if settings.optimizer.name == 'poet':
    sharding.check_partitions(settings.optimizer.poet.partitions, mesh)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = argparse.ArgumentParser(
    prog='python -m launch.worker.plan',
    description='Says what a run would need and take on devices not here.',
    epilog=_EXAMPLE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument('--config', help='a config file; FILE:ARG passes ARG')
  parser.add_argument(
    '--mesh', help='DATAxFSDPxTENSOR devices, e.g. 2x4x1; tensor in a node'
  )
  parser.add_argument(
    '--device', default='h100', help=f'{", ".join(devices.GPUS)}; default h100'
  )
  known, rest = parser.parse_known_args(arguments)
  for each in rest:
    if not re.match(r'--(no)?config\.', each):
      raise ValueError(f'{each} is no flag; --help lists them')
  for name in ('config', 'mesh'):
    if getattr(known, name) is None:
      raise ValueError(f'--{name} is missing; --help shows an example')
  return known, rest


def _mesh_sizes(text: str) -> sharding.MeshConfig:
  match = re.fullmatch(r'([1-9]\d*)x([1-9]\d*)x([1-9]\d*)', text)
  if match is None:
    raise ValueError(
      f'--mesh={text}: give DATAxFSDPxTENSOR, the devices along each axis, e.g.'
      ' --mesh=2x4x1'
    )
  sizes = sharding.MeshConfig(*map(int, match.groups()))
  if sizes.fsdp * sizes.tensor > _MOST_DEVICES:
    raise ValueError(
      f'--mesh={text}: fsdp x tensor = {sizes.fsdp * sizes.tensor}, and at most'
      f' {_MOST_DEVICES} can be compiled for: put more devices on the data axis'
    )
  if _longest_data(sizes) < min(sizes.data, _LEAST_DATA):
    raise ValueError(
      f'--mesh={text}: {_MOST_DEVICES} devices at most can be compiled for, so'
      f' data = {sizes.data} needs a divisor from {_LEAST_DATA} to'
      f' {_MOST_DEVICES // (sizes.fsdp * sizes.tensor)}: choose another mesh'
    )
  return sizes


def _gpu(name: str) -> devices.Gpu:
  if name not in devices.GPUS:
    raise ValueError(
      f'--device={name} is not in the table: choose one of'
      f' {", ".join(devices.GPUS)}'
    )
  return devices.GPUS[name]


def _settings(
  config: str, overrides: list[str], sizes: sharding.MeshConfig
) -> run_settings.RunSettings:
  loaded = config_file.load(config)
  config_file.override(loaded, overrides)
  settings = run_settings.from_plain(run_config.to_plain(loaded))
  # cuDNN's attention exists on GPUs only; its products are the same.
  model = dataclasses.replace(settings.model, attention='xla')
  return dataclasses.replace(settings, mesh=sizes, model=model)


def _use_fake_devices(data: int, sizes: sharding.MeshConfig) -> None:
  """Before jax starts: as many CPU devices as the compiled mesh has."""
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', data * sizes.fsdp * sizes.tensor)
  # A cached program would come without its text.
  jax.config.update('jax_enable_compilation_cache', False)


def _longest_data(sizes: sharding.MeshConfig) -> int:
  """The longest data axis that can be compiled and divides the real one."""
  most = _MOST_DEVICES // (sizes.fsdp * sizes.tensor)
  return max(n for n in range(1, most + 1) if sizes.data % n == 0)


def _with_data_axis(
  settings: run_settings.RunSettings, data: int
) -> run_settings.RunSettings:
  """The settings with another data axis and the same work per device."""
  train, sizes = settings.train, settings.mesh
  rows = train.batch_size // train.microbatches
  batch_size = train.batch_size * data // sizes.data
  places = max(1, train.loss_chunk_tokens // rows)
  return dataclasses.replace(
    settings,
    mesh=dataclasses.replace(sizes, data=data),
    train=dataclasses.replace(
      train,
      batch_size=batch_size,
      loss_chunk_tokens=places * (batch_size // train.microbatches),
    ),
  )


def _needs(settings: run_settings.RunSettings, state: Any) -> prediction.Bytes:
  """Bytes per device, by the shapes of the state and of the forward pass."""
  train, sizes = settings.train, settings.mesh
  rows = train.batch_size // train.microbatches
  length = settings.data.sequence_length
  parameters = _share(state.params)
  return prediction.Bytes(
    parameters=parameters,
    optimizer=_share(state.opt_state),
    gradients=parameters * min(2, train.microbatches),
    update=_matrices(state.params) if settings.optimizer.name == 'poet' else 0,
    activations=prediction.activation_bytes(
      settings.model,
      rows // (sizes.data * sizes.fsdp),
      length,
      min(length, max(1, train.loss_chunk_tokens // rows)),
      sizes.tensor,
    ),
  )


def _matrices(params: Any) -> int:
  """Bytes per device of the matrices that POET turns."""
  groups = jax.tree.leaves(optimizers.parameter_groups(params))
  leaves = jax.tree.leaves(params)
  return _share(
    [p for p, group in zip(leaves, groups, strict=True) if group == 'matrix']
  )


def _share(tree: Any) -> int:
  """Bytes of one device's part of arrays that have a sharding."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv))
