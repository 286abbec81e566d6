"""An exported run is what transformers reads, and equals its checkpoint."""

import json
import os

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxllm import huggingface
from launch.control import config_file
from launch.control import run_config
from launch.worker import checkpoint
from launch.worker import export
from launch.worker import program as program_lib
from launch.worker import run_settings
from tests import launched_run


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A finished run of three steps, with checkpoints of each."""
  directory = tmp_path_factory.mktemp('export')
  launched_run.write_corpus(directory / 'corpus')
  run = launched_run.LaunchedRun(
    directory / 'run',
    directory / 'corpus',
    '--config.train.steps=3',
    '--config.optimizer.warmup_steps=0',
    '--config.checkpoint.every=1',
    '--config.evaluate.every=0',
  )
  run.launch()
  assert run.finish() == 0
  return run


def _read(directory):
  index = json.loads((directory / 'model.safetensors.index.json').read_text())
  tensors = {}
  for name in set(index['weight_map'].values()):
    tensors |= safetensors.numpy.load_file(directory / name)
  assert set(tensors) == set(index['weight_map'])
  total = sum(tensor.nbytes for tensor in tensors.values())
  assert index['metadata']['total_size'] == total
  return tensors


def test_an_export_is_the_newest_checkpoint(run, tmp_path, monkeypatch, capsys):
  output = tmp_path / 'hf'
  flags = ['', f'--workdir={run.workdir}', f'--output={output}']
  monkeypatch.setattr('sys.argv', flags)
  assert export.main() == 0
  assert f'step 3 of {run.workdir} is in {output}' in capsys.readouterr().out
  with open(run.workdir / 'config.json') as file:
    settings = run_settings.from_plain(json.load(file))
  program = program_lib.build(settings, jax.devices())
  target = jax.eval_shape(program.initial_state, 0).params
  params = checkpoint.restore_params(str(run.workdir), target, pytest.fail)
  back = huggingface.from_huggingface(_read(output), settings.model)
  jax.tree.map(np.testing.assert_array_equal, back, dict(params))
  described = json.loads((output / 'config.json').read_text())
  assert described['hidden_size'] == settings.model.hidden_size
  assert described['eos_token_id'] is not None
  assert (output / 'tokenizer.json').read_bytes() == (
    run.workdir / 'tokenizer.json'
  ).read_bytes()
  assert export.main() == 2
  assert 'exists: name a directory to make' in capsys.readouterr().err


def test_what_cannot_be_exported_is_one_line(tmp_path):
  with pytest.raises(
    ValueError, match='has no checkpoints: name the directory'
  ):
    export.export(str(tmp_path), str(tmp_path / 'out'))
  assert os.listdir(tmp_path) == []


def test_one_parameter_at_a_time_gives_what_all_give(tmp_path):
  launched_run.write_corpus(tmp_path / 'corpus')
  path, *_ = launched_run.overrides(tmp_path / 'corpus')
  config = config_file.load(path.removeprefix('--config='))
  settings = run_settings.from_plain(run_config.to_plain(config))
  program = program_lib.build(settings, jax.devices())
  params = program.initial_state(0).params
  whole = huggingface.to_huggingface(params, settings.model)
  parts = {}
  for name, shape in huggingface.parameter_shapes(settings.model).items():
    leaf = params
    for part in name.split('/'):
      leaf = leaf[part]
    assert leaf.shape == shape
    parts |= huggingface.one_to_huggingface(name, leaf, settings.model)
  assert list(parts) == list(whole)
  for name, tensor in parts.items():
    np.testing.assert_array_equal(tensor, whole[name])
