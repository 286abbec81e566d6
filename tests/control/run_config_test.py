"""A workdir is bound to one config, one number of cores and one launcher."""

import json
import os
import subprocess
import sys

import ml_collections
import pytest

from launch.control import run_config
from launch.control import workdir_lock

PLAIN = {
  'train': {'steps': 100, 'learning_rate': 0.001},
  'data': [{'files': 'a'}, {'files': 'b'}],
  'checkpoint': {'every': 10},
  'log': {'every': 1},
  'launch': {'grace_s': 60.0},
  'profile': {'first_step': 3},
}


def _with(**changes):
  return {**PLAIN, **changes}


def _add_results(workdir):
  (workdir / 'metrics.jsonl').write_text('{"step": 1}\n')
  (workdir / 'data.json').write_text('{}')


def _snapshot(directory):
  return {
    str(path): (path.read_bytes(), path.stat().st_mtime_ns)
    for path in directory.rglob('*')
    if path.is_file()
  }


def test_a_config_becomes_json_values():
  config = ml_collections.ConfigDict(
    {
      'a': ({'b': 0.1 + 0.2}, {'b': 1e-300}),
      'c': None,
      'd': (True, 3, 'x', (1.0,)),
      'e': ml_collections.config_dict.placeholder(str),
    }
  )
  config.g = 5
  config.f = config.get_ref('g')
  plain = run_config.to_plain(config)
  assert plain == {
    'a': [{'b': 0.1 + 0.2}, {'b': 1e-300}],
    'c': None,
    'd': [True, 3, 'x', [1.0]],
    'e': None,
    'f': 5,
    'g': 5,
  }
  assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
  ('value', 'message'),
  [
    (len, r'config\.group\[1\]\.x is a builtin_function'),
    (1j, r'config\.group\[1\]\.x is a complex'),
    ({3: 4}, r'config\.group\[1\]\.x has the key 3'),
    (
      ml_collections.config_dict.required_placeholder(int),
      r'config\.group\[1\] has a key without value',
    ),
  ],
)
def test_what_json_cannot_hold_is_named(value, message):
  config = ml_collections.ConfigDict(
    {'group': (1, ml_collections.ConfigDict({'x': value}))}
  )
  with pytest.raises(ValueError, match=message):
    run_config.to_plain(config)


def test_the_same_config_binds_again(tmp_path):
  for _ in range(2):
    run_config.bind(str(tmp_path), PLAIN)
  assert json.loads((tmp_path / 'config.json').read_text()) == PLAIN
  assert [path.name for path in tmp_path.iterdir()] == ['config.json']


@pytest.mark.parametrize(
  'key', ['checkpoint', 'log', 'launch', 'profile', 'sample']
)
def test_what_decides_no_number_may_change(tmp_path, key):
  run_config.bind(str(tmp_path), PLAIN)
  _add_results(tmp_path)
  changed = _with(**{key: {'new': 5}})
  run_config.bind(str(tmp_path), changed)
  assert json.loads((tmp_path / 'config.json').read_text()) == changed


def test_the_cache_may_move_and_nothing_else_of_the_data(tmp_path):
  run_config.bind(str(tmp_path), {'data': {'cache_dir': 'a', 'cache_dirs': 1}})
  _add_results(tmp_path)
  moved = {'data': {'cache_dir': 'b', 'cache_dirs': 1}}
  run_config.bind(str(tmp_path), moved)
  assert json.loads((tmp_path / 'config.json').read_text()) == moved
  with pytest.raises(ValueError, match=r'config \(data\.cache_dirs: 1 -> 2\)'):
    run_config.bind(
      str(tmp_path), {'data': {'cache_dir': 'c', 'cache_dirs': 2}}
    )


def test_a_workdir_without_results_takes_the_corrected_config(tmp_path):
  run_config.bind(str(tmp_path), PLAIN)
  (tmp_path / 'data.json').write_text('{}')
  (tmp_path / 'metrics.jsonl').touch()
  (tmp_path / 'checkpoints' / '3.tmp').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '4').touch()
  run_config.bind(str(tmp_path), _with(seed=3))
  assert json.loads((tmp_path / 'config.json').read_text()) == _with(seed=3)
  assert not (tmp_path / 'data.json').exists()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'train': {'steps': 50, 'learning_rate': 0.001}},
      r'train\.steps: 100 -> 50',
    ),
    ({'train': {'steps': 100}}, r'train\.learning_rate: 0\.001 -> \(absent\)'),
    ({'data': [{'files': 'a'}]}, r'data\[1\]\.files: "b" -> \(absent\)'),
    ({'data': []}, r'data: \(absent\) -> \[\]'),
    ({'seed': 3}, r'seed: \(absent\) -> 3'),
    (
      {'train': {'steps': True, 'learning_rate': 0.001}},
      r'train\.steps: 100 -> true',
    ),
  ],
)
def test_another_config_is_refused_and_nothing_changes(
  tmp_path, changes, message
):
  run_config.bind(str(tmp_path), PLAIN)
  _add_results(tmp_path)
  before = _snapshot(tmp_path)
  with pytest.raises(ValueError, match=message) as caught:
    run_config.bind(str(tmp_path), {**PLAIN, **changes, 'log': {'every': 7}})
  assert str(tmp_path) in str(caught.value)
  assert str(caught.value).endswith('pass another --workdir')
  assert _snapshot(tmp_path) == before


def test_the_weights_of_a_refused_workdir_are_offered(tmp_path):
  run_config.bind(str(tmp_path), PLAIN)
  (tmp_path / 'checkpoints' / '10').mkdir(parents=True)
  with pytest.raises(ValueError, match='another config') as caught:
    run_config.bind(str(tmp_path), _with(seed=3))
  assert f'--config.init_from={tmp_path}/checkpoints ' in str(caught.value)


def test_a_long_list_of_differences_is_cut(tmp_path):
  run_config.bind(str(tmp_path), {f'key{n}': 1 for n in range(9)})
  _add_results(tmp_path)
  with pytest.raises(ValueError, match='key4: 1 -> 2; and 4 more') as caught:
    run_config.bind(str(tmp_path), {f'key{n}': 2 for n in range(9)})
  assert 'key5' not in str(caught.value)


def test_a_nan_in_a_config_equals_itself(tmp_path):
  for _ in range(2):
    run_config.bind(str(tmp_path), {'clip': float('nan')})
    _add_results(tmp_path)


@pytest.mark.parametrize('text', ['', '{"a":', '[]'])
def test_a_damaged_config_is_named(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  _add_results(tmp_path)
  with pytest.raises(ValueError, match=r'config\.json is no.*--workdir'):
    run_config.bind(str(tmp_path), PLAIN)


def test_the_first_number_of_cores_is_kept(tmp_path):
  workdir = str(tmp_path)
  assert run_config.recorded_num_cores(workdir, {'NPROC': '7'}, 1) == 7
  assert run_config.recorded_num_cores(workdir, {'NPROC': '9'}, 1) == 7
  assert run_config.recorded_num_cores(workdir, {}, 1) == 7


def test_the_visible_cores_are_recorded(tmp_path):
  expected = len(os.sched_getaffinity(0))
  assert run_config.recorded_num_cores(str(tmp_path), {}, 1) == expected
  assert json.loads((tmp_path / 'run.json').read_text()) == {
    'num_cores': expected
  }


def test_workers_of_one_host_share_its_cores(tmp_path):
  cores = len(os.sched_getaffinity(0))
  share = run_config.recorded_num_cores(str(tmp_path), {}, cores)
  assert share == 1
  assert run_config.recorded_num_cores(str(tmp_path), {}, 1) == 1


def test_a_mesh_may_change_between_two_starts(tmp_path):
  for data in (4, 2):
    run_config.bind(str(tmp_path), _with(mesh={'data': data}))
    _add_results(tmp_path)


@pytest.mark.parametrize('number', ['many', '0', '-1', '1.5'])
def test_a_number_of_cores_must_be_one(tmp_path, number):
  with pytest.raises(ValueError, match='NPROC'):
    run_config.recorded_num_cores(str(tmp_path), {'NPROC': number}, 1)


@pytest.mark.parametrize(
  ('launch', 'message'),
  [
    (3, 'no group `launch`'),
    ({'max_restarts': 1}, r'no key launch\.max_restarts_without_progress'),
    ({'max_restarts': -1}, r'launch\.max_restarts is -1'),
    ({'max_restarts': True}, r'launch\.max_restarts is True'),
    ({'max_restarts': 1.5}, r'launch\.max_restarts is 1\.5'),
    (
      {'max_restarts': 0, 'max_restarts_without_progress': 0},
      r'launch\.max_restarts_without_progress is 0; set it to int >= 1',
    ),
  ],
)
def test_launch_settings_are_checked(launch, message):
  train = {'deterministic': True}
  config = ml_collections.ConfigDict({'launch': launch, 'train': train})
  with pytest.raises(ValueError, match=message):
    run_config.launch_settings(config)


def test_a_lock_is_exclusive_and_names_its_owner(tmp_path):
  workdir = str(tmp_path)
  assert not workdir_lock.is_locked(workdir)
  lock = workdir_lock.WorkdirLock(workdir)
  lock.write_owner(worker_pids=[])
  assert workdir_lock.is_locked(workdir)
  with pytest.raises(ValueError, match=f'in use by launcher {os.getpid()}'):
    workdir_lock.WorkdirLock(workdir)
  lock.release()
  assert not workdir_lock.is_locked(workdir)
  workdir_lock.WorkdirLock(workdir).release()


def test_an_heir_holds_the_lock_on(tmp_path):
  workdir = str(tmp_path)
  lock = workdir_lock.WorkdirLock(workdir)
  heir = subprocess.Popen(
    [sys.executable, '-c', 'input()'],
    stdin=subprocess.PIPE,
    pass_fds=(lock.fd,),
  )
  lock.release()
  assert workdir_lock.is_locked(workdir)
  heir.communicate(b'\n')
  assert not workdir_lock.is_locked(workdir)
