"""Bad input ends in one clear line and an exit code, and damages nothing.

What only a whole launch can show runs as processes. The rest runs the worker's
`main` in this process, which saves it the start.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

from launch.control import config_file
from launch.control import protocol
from launch.control import run_config
from launch.control.protocol import ExitCode
from launch.worker import __main__ as worker_main
from launch.worker import checkpoint
from launch.worker import program as program_lib
from launch.worker import read_data
from launch.worker import run_settings
from tests import launched_run

_ADAMW = '--config.optimizer.name=adamw'


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  directory = tmp_path_factory.mktemp('bad_input') / 'corpus'
  launched_run.write_corpus(directory)
  return directory


@pytest.fixture
def work(monkeypatch):
  """`work(workdir, corpus, *flags)`: the worker's exit code and events."""
  settings = ('compilation_cache_dir', 'persistent_cache_min_compile_time_secs')
  before = {name: getattr(jax.config, f'jax_{name}') for name in settings}
  handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

  def run(workdir, corpus, *flags):
    workdir.mkdir(exist_ok=True)
    run_config.bind(str(workdir), _plain(corpus, *flags))
    read_fd, write_fd = os.pipe()
    arguments = [
      *('', f'--workdir={workdir}', '--process=0', '--processes=1'),
      *('--coordinator=', '--bind=', '--join_timeout_s=60'),
      f'--events_fd={write_fd}',
    ]
    monkeypatch.setattr(sys, 'argv', arguments)
    with open(read_fd, 'rb') as pipe:
      try:
        exit_code = worker_main.main()
      finally:
        os.close(write_fd)
      return exit_code, [protocol.decode(line) for line in pipe]

  yield run
  for name, value in before.items():
    jax.config.update(f'jax_{name}', value)
  for number, handler in handlers.items():
    signal.signal(number, handler)


@pytest.fixture(scope='module')
def trained(tmp_path_factory, corpus):
  """The finished run of 3 steps that others must leave intact."""
  workdir = tmp_path_factory.mktemp('trained') / 'run'
  run = launched_run.LaunchedRun(workdir, corpus, *_SHORT)
  run.launch()
  assert run.finish() == 0, run.errors()
  return workdir


_SHORT = (
  _ADAMW,
  '--config.train.steps=3',
  '--config.optimizer.warmup_steps=1',
  '--config.checkpoint.every=1',
  '--config.evaluate.every=0',
)


@pytest.mark.parametrize(
  ('flags', 'text'),
  [
    (['--config.data.train[0].files=/nowhere/*.txt'], '/nowhere/.* no file'),
    (['--config.data.train[0].files={empty}/*.txt'], 'holds no text; point'),
    (['--config.optimizer.poet.block_size=7'], 'block_size=7 does not divide'),
    (['--config.data.sequence_length=99999'], 'has .* tokens, .* lower it or'),
    (['--config.model.vocab_size=9'], r'has \d+ tokens, .* is 9: raise it to'),
    (['--config.init_from=/nowhere'], '/nowhere is no directory: name the'),
    (
      [_ADAMW, '--config.init_from={trained}', '--config.model.num_layers=1'],
      r'k_proj/kernel is float32\[2, 32, 32\] there and float32\[1, 32, 32',
    ),
    (['--config.train.microbatches=3'], 'microbatches=3 does not divide'),
  ],
)
def test_what_the_worker_refuses_is_one_line(
  work, tmp_path, corpus, trained, flags, text
):
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'empty' / 'a.txt').touch()
  flags = [f.format(empty=tmp_path / 'empty', trained=trained) for f in flags]
  exit_code, events = work(tmp_path / 'run', corpus, *flags)
  assert exit_code == ExitCode.USER_ERROR
  _assert_one_error(events, text)


def test_a_model_beyond_any_memory_is_reported_with_remedies(
  work, tmp_path, corpus
):
  flags = (
    *_SHORT,
    # 160 TB for one leaf: refused without a byte of it being touched.
    '--config.model.vocab_size=2000000000',
    '--config.model.hidden_size=20000',
  )
  exit_code, events = work(tmp_path / 'run', corpus, *flags)
  assert exit_code == ExitCode.OUT_OF_MEMORY
  _assert_one_error(events, r'out of memory: .* try a larger train\.microbatch')


def test_changed_data_is_named_and_the_run_left_alone(
  work, tmp_path, corpus, trained
):
  shutil.copytree(trained, tmp_path / 'run')
  before = _snapshot(tmp_path / 'run')
  original = (corpus / '03.txt').read_text()
  try:
    (corpus / '03.txt').write_text(f'{original} one more')
    exit_code, events = work(tmp_path / 'run', corpus, *_SHORT)
  finally:
    (corpus / '03.txt').write_text(original)
  assert exit_code == ExitCode.USER_ERROR
  _assert_one_error(events, r'file 03\.txt was \d+ bytes, is \d+.* restore it')
  assert _snapshot(tmp_path / 'run') == before


def test_damage_to_every_checkpoint_is_told_and_nothing_is_touched(
  work, tmp_path, corpus, trained
):
  workdir = tmp_path / 'run'
  shutil.copytree(trained, workdir)
  for file in workdir.glob('checkpoints/*/metadata/metadata'):
    file.write_text('{}')
  before = _snapshot(workdir / 'checkpoints')
  exit_code, events = work(workdir, corpus, *_SHORT)
  assert exit_code == ExitCode.USER_ERROR
  _assert_one_error(events, 'all checkpoints in .* are damaged .* Put back a')
  assert _snapshot(workdir / 'checkpoints') == before


def test_weights_of_another_run_are_where_training_begins(
  tmp_path, corpus, trained
):
  flags = (*_SHORT, f'--config.init_from={trained}')
  run = launched_run.LaunchedRun(tmp_path / 'run', corpus, *flags)
  run.launch()
  assert run.finish() == 0
  settings = run_settings.from_plain(_plain(corpus, *flags))
  program = program_lib.build(settings, jax.devices())
  target = jax.eval_shape(program.initial_state, 0).params
  params = checkpoint.restore_params(str(trained), target, _never)
  data = read_data.prepare(
    settings.data, settings.model.vocab_size, _never, _never
  )
  with contextlib.closing(
    read_data.batches(
      data.train,
      settings.train.batch_size,
      0,
      range(settings.train.batch_size),
    )
  ) as batches:
    _, batch = next(batches)
  loss = jax.jit(program.evaluation_loss)(params, batch)
  begun_at = json.loads(run.values()[0])['loss']
  np.testing.assert_allclose(begun_at, loss.sum / loss.weight, rtol=1e-6)
  other = (trained / 'metrics.jsonl').read_text().splitlines()[0]
  assert begun_at < json.loads(other)['loss'] - 1e-3


def test_a_loss_that_is_not_finite_ends_the_launch_at_once(tmp_path, corpus):
  run = launched_run.LaunchedRun(tmp_path / 'run', corpus, *_SHORT)
  run.launch('--config.optimizer.adamw.learning_rate=1e30')
  assert run.finish() == ExitCode.NOT_FINITE
  assert run.exits() == [ExitCode.NOT_FINITE]
  (line,) = run.errors().splitlines()
  assert line.startswith('error: step 2: param_norm is inf')
  assert 'lower the learning rate' in line
  # Nothing that is not finite is saved.
  assert run.saved_steps() == [1]


def test_what_the_launcher_refuses_changes_no_file(tmp_path, corpus, trained):
  before = _snapshot(trained)
  run = launched_run.LaunchedRun(trained, corpus, *_SHORT)
  for flags, text in (
    (['--config.trian.steps=3'], 'has no key trian; did you mean config.train'),
    (['--config.train.steps=4'], 'holds a run with another config (train.step'),
  ):
    run.launch(*flags)
    assert run.finish() == ExitCode.USER_ERROR
    (line,) = run.errors().splitlines()
    assert line.startswith('error: ')
    assert text in line
    assert run.output() == ''
  assert _snapshot(trained) == before


# Imported as root: the interpreter itself may be closed to others.
_AS_NOBODY = """
import os, sys
from launch import main
os.setuid(65534)
sys.exit(main.main(sys.argv))
"""


@pytest.mark.skipif(os.getuid() != 0, reason='only root can become another')
def test_a_workdir_of_another_user_is_refused(corpus, trained):
  # Not in tmp_path, whose parents are closed to others.
  with tempfile.TemporaryDirectory() as directory:
    os.chmod(directory, 0o755)
    config = shutil.copy(launched_run.CONFIG, directory)
    workdir = shutil.copytree(trained, os.path.join(directory, 'run'))
    before = _snapshot(pathlib.Path(workdir))
    result = subprocess.run(
      [
        *(sys.executable, '-c', _AS_NOBODY),
        *(f'--config={config}:{corpus}', f'--workdir={workdir}', *_SHORT),
      ],
      capture_output=True,
      text=True,
      check=False,
    )
    assert _snapshot(pathlib.Path(workdir)) == before
  assert result.returncode == ExitCode.USER_ERROR
  (line,) = result.stderr.splitlines()
  assert line.startswith(f'error: Permission denied: {workdir}')
  assert line.endswith('correct it, or pass another --workdir')


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 1.5 MB and `grow(size)`."""
  directory = tmp_path / 'disk'
  directory.mkdir()

  def mount(options):
    command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(directory)]
    return subprocess.run(command, capture_output=True, check=False).returncode

  if mount('size=1500k') != 0:
    pytest.skip('mounting a small file system is not permitted here')
  yield directory, lambda size: mount(f'remount,size={size}')
  subprocess.run(['umount', '-l', str(directory)], check=True)


def test_a_full_disk_ends_the_launch_and_with_space_it_continues(
  small_disk, corpus, trained
):
  disk, grow = small_disk
  flags = (
    *_SHORT,
    '--config.checkpoint.keep_last=9',
    '--config.log.tensorboard=True',
  )
  run = launched_run.LaunchedRun(disk / 'run', corpus, *flags)
  run.launch()
  assert run.finish() == ExitCode.DISK_FULL
  # The worker meets the full disk, or the launcher's journal does before it.
  assert run.exits() in ([ExitCode.DISK_FULL], [])
  (line,) = run.errors().splitlines()
  assert re.search('free (some )?space and run the same command again', line)
  saved = run.saved_steps()
  assert saved
  assert saved[-1] < 3
  assert grow('16m') == 0
  run.launch()
  assert run.finish() == 0
  assert f'continuing from step {saved[-1]}' in run.output()
  undisturbed = launched_run.LaunchedRun(trained, corpus)
  launched_run.assert_same(run, undisturbed)


def _plain(corpus, *flags):
  path, *rest = launched_run.overrides(corpus)
  config = config_file.load(path.removeprefix('--config='))
  config_file.override(config, (*rest, *flags))
  return run_config.to_plain(config)


def _assert_one_error(events, text):
  errors = [e for e in events if e.kind == protocol.EventKind.ERROR]
  assert len(errors) == 1
  assert '\n' not in errors[0].data['text']
  assert not errors[0].data['traceback']
  assert re.search(text, errors[0].data['text'])


def _never(*arguments):
  raise AssertionError(arguments)


def _snapshot(directory):
  """Every file's content by name; a lock says nothing."""
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in directory.rglob('*')
    if path.is_file() and path.name != 'lock'
  }
