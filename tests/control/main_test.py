"""The command line: help, status, and one line for every mistake."""

import re
import signal
import subprocess
import sys
import time

import pytest

from launch import main
from launch.control import protocol


def test_help_is_short_and_quick_and_loads_no_array_library():
  begun = time.monotonic()
  result = subprocess.run(
    [sys.executable, '-X', 'importtime', '-m', 'launch.main', '--help'],
    capture_output=True,
    text=True,
    check=True,
  )
  assert time.monotonic() < begun + 5  # 0.4 s alone on the machine.
  assert len(result.stdout.splitlines()) < 60
  for code in protocol.ExitCode:
    assert re.search(rf'^  {code.value} ', result.stdout, re.MULTILINE)
  imported = set(re.findall(r'\| +(\w+)', result.stderr))
  assert 'ml_collections' in imported
  assert not imported & {'jax', 'jaxlib', 'numpy', 'flax', 'orbax'}
  assert 'launch.worker' not in result.stderr


def _make_file(path):
  path.write_text('in the way')


def _make_run_of_another_config(path):
  path.mkdir()
  (path / 'config.json').write_text('{"train": {"steps": 9}}')
  (path / 'metrics.jsonl').write_text('{"step": 1}\n')


def _make_broken_journal(path):
  path.mkdir()
  (path / 'journal.sqlite').write_text('no database')


@pytest.mark.parametrize(
  ('arguments', 'make', 'message'),
  [
    (['--workdri=x'], None, r"flag 'workdri'\. Did you mean: workdir"),
    (['--workdir='], None, r"--workdir is ''"),
    (['--workdir=gs://bucket/run'], None, r'pass a local directory'),
    (['--workdir'], None, r'Missing value for flag --workdir'),
    (['stats'], None, r"'stats' is no subcommand; the only one is `status`"),
    (['--config='], None, r'no --config was given; pass --config=FILE'),
    (['--config=nowhere.py'], None, r"config file 'nowhere\.py' \(No such"),
    (['--config.train.stepz=5'], None, r'did you mean config\.train\.steps'),
    (['--config.train.steps=x'], None, r'needs a value of type int'),
    (['--config.launch.grace_s=-1'], None, r'launch\.grace_s is -1\.0'),
    ([], _make_file, r'cannot be a directory.*is a file'),
    (['--workdir=/proc/nowhere'], None, r'No such file.*/proc/nowhere'),
    ([], _make_run_of_another_config, r'train\.steps: 9 -> 10'),
    ([], _make_broken_journal, r'journal\.sqlite is not a readable journal'),
    (['status'], None, r'journal\.sqlite does not exist'),
    (['status'], _make_broken_journal, r'is not a readable journal'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  tmp_path, config_path, capsys, arguments, make, message
):
  workdir = tmp_path / 'run'
  if make is not None:
    make(workdir)
  flags = ['', f'--config={config_path}', f'--workdir={workdir}', *arguments]
  worker = [sys.executable, '-c', 'raise AssertionError("started")']
  assert main.run(flags, worker) == 2
  captured = capsys.readouterr()
  assert captured.out == ''
  assert re.fullmatch(rf'error: .*{message}.*\n', captured.err)


def test_a_mistake_is_told_without_traceback_in_the_shell(tmp_path):
  result = subprocess.run(
    [sys.executable, '-m', 'launch.main', f'--config={tmp_path}/none.py'],
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 2
  assert result.stderr.startswith('error: cannot read the config file')
  assert len(result.stderr.splitlines()) == 1
  assert not result.stdout


@pytest.mark.parametrize('name', ['config.json', 'run.json', 'worker.log'])
def test_a_full_disk_at_the_start_has_its_own_exit_code(
  tmp_path, config_path, capsys, name
):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  # The kernel's own full disk: every write fails with ENOSPC.
  target = name if name == 'worker.log' else f'{name}.tmp'
  (workdir / target).symlink_to('/dev/full')
  flags = ['', f'--config={config_path}', f'--workdir={workdir}']
  assert main.run(flags, [sys.executable, '-c', '']) == 12
  assert 'No space left on device' in capsys.readouterr().err
  assert not (workdir / name).exists() or name == 'worker.log'


def test_signal_handlers_are_put_back(tmp_path, config_path):
  before = signal.getsignal(signal.SIGTERM)
  flags = ['', f'--config={config_path}', f'--workdir={tmp_path}/run']
  assert main.run(flags, [sys.executable, '-c', '']) == 0
  assert signal.getsignal(signal.SIGTERM) == before
