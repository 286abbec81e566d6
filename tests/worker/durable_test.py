"""Files are whole or absent; a lock is held by one and dies with its holder."""

import threading

import pytest

from launch.worker import durable


def _fail(line):
  pytest.fail(f'unexpected: {line}')


def test_json_comes_back(tmp_path):
  file = str(tmp_path / 'a.json')
  assert durable.read_json(file) is None
  durable.write_json(file, {'a': [1, 2]})
  assert durable.read_json(file) == {'a': [1, 2]}
  assert [path.name for path in tmp_path.iterdir()] == ['a.json']


def test_a_failed_write_leaves_the_old_content(tmp_path):
  file = str(tmp_path / 'a.json')
  durable.write_json(file, 1)
  with pytest.raises(TypeError):
    durable.write_json(file, object())
  assert durable.read_json(file) == 1


def test_damaged_json_names_its_file(tmp_path):
  (tmp_path / 'a.json').write_text('{"a": ')
  with pytest.raises(ValueError, match=r'a\.json is damaged .*; delete it'):
    durable.read_json(str(tmp_path / 'a.json'))


def test_one_holder_at_a_time(tmp_path):
  path = str(tmp_path / 'cache')
  waits, order = threading.Event(), []

  def tell(line):
    order.append(line.split(';')[1])
    waits.set()

  def second():
    with durable.locked(path, tell):
      order.append('second')

  thread = threading.Thread(target=second)
  with durable.locked(path, _fail):
    thread.start()
    assert waits.wait(10)
    order.append('first')
  thread.join(10)
  assert order == [' waiting for it.', 'first', 'second']
  with durable.locked(path, _fail):
    pass


def test_an_error_inside_releases_the_lock(tmp_path):
  path = str(tmp_path / 'cache')
  with pytest.raises(KeyError):
    with durable.locked(path, _fail):
      raise KeyError
  with durable.locked(path, _fail):
    pass
