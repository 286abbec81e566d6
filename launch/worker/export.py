"""Exports a run's weights for Hugging Face transformers, one array at a time.

  python -m launch.worker.export --workdir=runs/mine --output=mine-hf

Writes `config.json`, `tokenizer.json`, one safetensors file per parameter and
the index that names them, from the newest good checkpoint. Only one stacked
parameter is in memory at a time, verified against its digest.
"""

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

import jax
import safetensors.numpy
import tqdm

from jaxllm import huggingface
from launch.control.protocol import ExitCode
from launch.worker import checkpoint_reader
from launch.worker import durable
from launch.worker import run_settings
from launch.worker import tokenizer as tokenizer_lib

_INDEX = 'model.safetensors.index.json'


def main() -> int:
  """Exports; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--workdir', required=True, help='of the run')
  parser.add_argument(
    '--output', required=True, help='directory to make; must not exist'
  )
  flags = parser.parse_args()
  try:
    step = export(flags.workdir, flags.output)
  except (ValueError, OSError) as error:
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    return ExitCode.USER_ERROR
  print(f'step {step} of {flags.workdir} is in {flags.output}')
  return ExitCode.DONE


def export(workdir: str, output: str) -> int:
  """Writes the weights of a run's newest good checkpoint.

  Args:
    workdir: of the run.
    output: a directory that does not exist; complete or absent afterwards.

  Returns:
    The checkpoint's step.

  Raises:
    ValueError: the output exists, or there is nothing good to export.
    OSError: a file cannot be read or written.
  """
  if os.path.exists(output):
    raise ValueError(f'--output={output} exists: name a directory to make')
  checkpoints = os.path.join(workdir, 'checkpoints')
  if not os.path.isdir(checkpoints):
    raise ValueError(
      f'--workdir={workdir} has no checkpoints: name the directory of a run'
    )
  with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as file:
    settings = run_settings.from_plain(json.load(file))
  partial = f'{output.rstrip("/")}.partial'
  os.makedirs(partial, exist_ok=True)
  shapes = huggingface.parameter_shapes(settings.model)
  files, total_size, step = {}, 0, None
  for number, (path, shape) in enumerate(tqdm.tqdm(shapes.items(), 'export')):
    step, array = _read(checkpoints, path, shape, step)
    tensors = huggingface.one_to_huggingface(path, array, settings.model)
    name = f'model-{number + 1:05}-of-{len(shapes):05}.safetensors'
    safetensors.numpy.save_file(
      tensors, os.path.join(partial, name), metadata={'format': 'pt'}
    )
    files |= dict.fromkeys(tensors, name)
    total_size += sum(tensor.nbytes for tensor in tensors.values())
  index = {'metadata': {'total_size': total_size}, 'weight_map': files}
  durable.write_json(os.path.join(partial, _INDEX), index)
  tokenizer = tokenizer_lib.load(
    dataclasses.replace(
      settings.data.tokenizer, file=os.path.join(workdir, 'tokenizer.json')
    )
  )
  tokenizer.save(os.path.join(partial, 'tokenizer.json'))
  config = huggingface.config_to_huggingface(
    settings.model,
    max_position_embeddings=settings.data.sequence_length,
    bos_token_id=None,
    eos_token_id=tokenizer.end_id,
  )
  durable.write_json(os.path.join(partial, 'config.json'), config)
  os.rename(partial, output)
  return step


def _read(
  checkpoints: str, path: str, shape: tuple[int, ...], step: int | None
) -> tuple[int, Any]:
  """One parameter of the newest checkpoint where it is good, and its step."""
  name = f'params/{path}'
  target = {name: jax.ShapeDtypeStruct(shape, jax.numpy.float32)}
  found, _ = checkpoint_reader.newest_good(checkpoints, target, name)
  if found is None:
    raise ValueError(f'{checkpoints} holds no checkpoint: train first')
  if step not in (None, found.step):
    raise ValueError(
      f'step {step} in {checkpoints} is damaged at {path}: move it away, and'
      f' step {found.step} is exported'
    )
  return found.step, found.state[name]


if __name__ == '__main__':
  sys.exit(main())
