"""Config files and overrides: typed, and clear about what is wrong."""

import ml_collections
import pytest

from launch.control import config_file


def _config():
  config = ml_collections.ConfigDict()
  config.train = {'steps': 100, 'rate': 0.5, 'remat': True, 'mesh': (1, 2)}
  config.data = ({'files': 'a', 'weight': 1.0}, {'files': 'b', 'weight': 2.0})
  config.init_from = ml_collections.config_dict.placeholder(str)
  config.nothing = None
  config.names = ['a']
  return config


def test_overrides_set_keys_and_keep_types():
  config = _config()
  config_file.override(
    config,
    [
      '--config.train.steps=1_000'.replace('_', ''),
      '--config.train.rate=1',
      '--noconfig.train.remat',
      '--config.train.mesh=(4,2,1)',
      '--config.data[1].weight=0.25',
      '--config.data[0].files=x=y, z',
      '--config.init_from=old/checkpoints',
    ],
  )
  assert config.train.to_dict() == {
    'steps': 1000,
    'rate': 1.0,
    'remat': False,
    'mesh': (4, 2, 1),
  }
  assert isinstance(config.train.rate, float)
  assert config.data[1]['weight'] == 0.25
  assert config.data[0]['files'] == 'x=y, z'
  assert config.init_from == 'old/checkpoints'
  assert config.is_locked


def test_the_last_of_two_overrides_counts():
  config = _config()
  config_file.override(
    config, ['--config.train.steps=1', '--config.train.steps=2']
  )
  assert config.train.steps == 2


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--config.train.stepz=5', r'did you mean config\.train\.steps\?'),
    ('--config.trian.steps=5', r'did you mean config\.train\?'),
    ('--config.xyzzy=5', 'its keys are data, init_from, names, nothing, train'),
    ('--config.data[0].file=x', r'did you mean config\.data\[0\]\.files\?'),
    ('--config.data[2].files=x', r'config\.data has 2 items'),
    ('--config.data[-1].files=x', r'config\.data has 2 items'),
    ('--config.data.train=x', r'config\.data has 2 items'),
    ('--config.train.steps=abc', "type int, not 'abc'"),
    ('--config.train.steps=1.5', "type int, not '1.5'"),
    ('--config.train.steps=', "type int, not ''"),
    ('--config.train.rate=fast', "type float, not 'fast'"),
    ('--config.train.remat=maybe', "type bool, not 'maybe'"),
    ('--config.train.steps', r'write --config\.train\.steps=VALUE'),
    ('--config.train=5', 'one by one'),
    ('--config.train.mesh[0]=3', r'set all of it.*mesh="\(1,2\)"'),
    ('--config.train.mesh=(1,', 'cannot apply'),
    ('--config.train.steps.more=3', 'is 100 and has no key more'),
    ('--config.nothing=3', 'placeholder'),
    ('--config.names=b', 'tuple'),
    ('--config.=3', 'no path of a key'),
    ('--config.train.=3', 'no path of a key'),
    ('--config.a b=3', 'no path of a key'),
  ],
)
def test_a_wrong_override_is_named_with_a_remedy(argument, message):
  config = _config()
  before = config.to_json_best_effort()
  with pytest.raises(ValueError, match=message) as caught:
    config_file.override(config, ['--config.train.rate=0.5', argument])
  assert argument in str(caught.value)
  assert '\n' not in str(caught.value)
  assert config.to_json_best_effort() == before


def test_a_file_is_run_with_its_argument(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text(
    'import ml_collections\n'
    'def get_config(arg=None):\n'
    '  return ml_collections.ConfigDict({"arg": arg})\n'
  )
  assert config_file.load(str(path)).arg is None
  assert config_file.load(f'{path}:a:b').arg == 'a:b'
  assert [entry.name for entry in tmp_path.iterdir()] == ['config.py']


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('def get_config(', 'failed at line 1: SyntaxError'),
    ('x = 1', 'no function get_config'),
    ('get_config = 3', 'no function get_config'),
    ('\n\nimport nowhere_at_all', 'failed at line 3: ModuleNotFoundError'),
    ('raise SystemExit(3)', 'failed at line 1: SystemExit'),
    ('def get_config():\n  return 1 / 0', 'failed at line 2: ZeroDivisionErr'),
    ('def get_config(a, b): pass', 'failed: TypeError'),
    ('def get_config(): return {}', 'returned dict'),
    ('def get_config(): pass', 'returned NoneType'),
    ('x = 1\0', 'SyntaxError'),
  ],
)
def test_a_bad_config_file_is_named_with_its_line(tmp_path, source, message):
  path = tmp_path / 'config.py'
  path.write_text(source)
  with pytest.raises(ValueError, match=message) as caught:
    config_file.load(str(path))
  assert str(path) in str(caught.value)
  assert '\n' not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  for path in (str(tmp_path / 'missing.py'), str(tmp_path), ''):
    with pytest.raises(ValueError, match='cannot read the config file'):
      config_file.load(path)
  binary = tmp_path / 'binary.py'
  binary.write_bytes(b'\xff\xfe\x00')
  with pytest.raises(ValueError, match='not a Python file'):
    config_file.load(str(binary))
