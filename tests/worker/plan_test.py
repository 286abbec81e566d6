"""A plan's bytes are the shards' sizes, and bad input ends in one line."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from jaxllm import sharding
from jaxllm.train import devices
from launch.control import config_file
from launch.control import run_config
from launch.worker import plan as plan_lib
from launch.worker import plan_report
from launch.worker import run_settings
from tests import compilation

_CONFIG = pathlib.Path(__file__).parents[1] / 'tiny_config.py'
_FLAGS = (f'--config={_CONFIG}:nowhere', '--mesh=2x2x2')
_POET = '--config.optimizer.poet.partitions=2'
_GPU = devices.GPUS['h100']
# tests/tiny_config.py: vocabulary, width, feed-forward width, layers, block.
_V, _D, _F, _N, _B = 300, 32, 64, 2, 8
_MATRICES = [(_D, _D)] * 4 + [(_D, _F)] * 3


def _settings(name: str, mesh: tuple[int, int, int], *overrides: str):
  config = config_file.load(f'{_CONFIG}:nowhere')
  name = f'--config.optimizer.name={name}'
  config_file.override(config, [name, _POET, *overrides])
  settings = run_settings.from_plain(run_config.to_plain(config))
  return dataclasses.replace(settings, mesh=sharding.MeshConfig(*mesh))


def _make(*arguments) -> plan_report.Plan:
  settings = _settings(*arguments)
  plan_lib.check(settings)
  with compilation.no_cache():
    return plan_lib.make(settings, _GPU)


@pytest.fixture(scope='module', params=['adamw', 'poet'])
def plan(request):
  """The name of an optimizer and its plan for 2 x 2 x 2 devices."""
  return request.param, _make(request.param, (2, 2, 2))


def test_bytes_are_those_of_the_shards(plan):
  name, plan = plan
  matrices = _N * sum(m * n for m, n in _MATRICES) // 4
  embeddings = 2 * _V * _D // 4
  norms = _N * 2 * _D + _D
  needs = plan.needs
  assert needs.parameters == 4 * (matrices + embeddings + norms)
  assert needs.gradients == 2 * needs.parameters  # one, and the sum
  if name == 'adamw':
    moments, update = 2 * (matrices + embeddings + norms), 0
  else:
    # Every side lies on an axis of two devices.
    sides = _N * sum((m + n) // _B * (_B * (_B - 1) // 2) for m, n in _MATRICES)
    moments = matrices + 3 * sides // 2 + 2 * (embeddings + norms)
    update = 4 * matrices
  assert needs.update == update
  # Counts, norms per layer and readings.
  assert 0 < needs.optimizer - 4 * moments < 300


def test_the_compiled_step_takes_in_what_the_shapes_say(plan):
  _, plan = plan
  rows = 16 // 4 * 32 * 5 * 4  # 16 rows of 32 on four parts, five arrays
  state = plan.needs.parameters + plan.needs.optimizer
  taken = plan.compiled.argument_size_in_bytes
  assert taken == pytest.approx(state + rows, rel=0.1)
  assert plan.compiled.alias_size_in_bytes == pytest.approx(state, rel=0.1)


def test_products_are_at_least_those_of_the_model(plan):
  name, plan = plan
  model = plan_report.model_flops(_settings(name, (2, 2, 2)))
  found = sum(each.flops * each.times for each in plan.products)
  # A step has so few tokens that POET's products with blocks show.
  assert model < found < (1.2 if name == 'adamw' else 3) * model


def test_a_mesh_beyond_the_compiler_is_stretched(monkeypatch):
  monkeypatch.setattr(plan_lib, '_MOST_DEVICES', 8)
  rows = '--config.train.batch_size=32'
  chunk = '--config.train.loss_chunk_tokens=128'
  small = _make('adamw', (2, 2, 2))
  large = _make('adamw', (4, 2, 2), rows, chunk)
  assert large.compiled_data == 2
  assert large.needs == small.needs
  assert large.products == small.products
  for key, each in large.transfers.items():
    axes, kind = key
    before = small.transfers[key].wire_bytes
    if 'data' not in axes:
      assert each.wire_bytes == before
    elif axes == ('data',) and kind == 'all-reduce':
      assert each.wire_bytes == pytest.approx(before * (3 / 4) / (1 / 2))
  assert any(axes == ('data',) for axes, _ in large.transfers)


def test_the_command_prints_a_table():
  command = [sys.executable, '-m', 'launch.worker.plan', *_FLAGS, _POET]
  told = subprocess.run(
    [*command, '--device=a100'], capture_output=True, text=True, check=True
  ).stdout
  assert 'data=2 fsdp=2 tensor=2: 8 a100, 8 in a node' in told
  assert 'poet, b = 8, partitions = 2' in told
  for row in ('parameters', 'work space', 'products in f32', 'fsdp all-gather'):
    assert re.search(rf'^  {row} .*\d', told, re.MULTILINE), row
  assert re.search(r'overlapped +\d+\.\d+  MFU \d+\.\d%, [\d,]+ tok', told)
  assert 'Assumed, not measured' in told
  assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--mesh=2x4',), r'--mesh=2x4: give DATAxFSDPxTENSOR'),
    (('--mesh=-1x4x1',), r'--mesh=-1x4x1: give'),
    (('--mesh=2x0x1',), r'--mesh=2x0x1: give'),
    (('--mesh=1x64x64',), r'fsdp x tensor = 4096.*at most 2048'),
    (('--mesh=2053x1x1',), r'data = 2053 needs a divisor from 8 to 2048'),
    (('--mesh=3x1x1',), r'batch_size / train.microbatches=8.*= 3: choose'),
    (('--mesh=1x1x4',), r'num_heads=2 do not share out over tensor = 4'),
    (('--mesh=2x4x1',), r'partitions=2 must be a multiple.*set it to 4'),
    (('--config.optimizer.poet.block_size=32',), 'block_size=32 does not div'),
    (('--config.model.vocab_size=301',), r'301.* cannot be split into 2'),
    (('--device=b200',), 'b200 is not in the table: choose one of a100, h100'),
    (('--speed=9',), '--speed=9 is no flag'),
    (('--config=nowhere.py',), 'cannot read the config file'),
    (('--config.model.width=3',), 'has no key width'),
    (('--mesh',), 'expected one argument'),
  ],
)
def test_bad_input_ends_in_one_line(flags, message, capsys):
  # The last of a flag given twice counts. `main` switches the cache off.
  with compilation.no_cache():
    assert plan_lib.main(['plan', *_FLAGS, _POET, *flags]) == 2
  printed = capsys.readouterr()
  assert printed.out == ''
  assert re.fullmatch(r'error: .*\n', printed.err)
  assert re.search(message, printed.err)


@pytest.mark.parametrize('name', ['config', 'mesh'])
def test_a_missing_flag_is_named(name, capsys):
  flags = [each for each in _FLAGS if not each.startswith(f'--{name}=')]
  assert plan_lib.main(['plan', *flags]) == 2
  assert f'error: --{name} is missing' in capsys.readouterr().err


def test_help_shows_an_example(capsys):
  with pytest.raises(SystemExit) as ended:
    plan_lib.main(['plan', '--help'])
  assert ended.value.code == 0
  assert '--mesh=2x4x1' in capsys.readouterr().out
