"""The event log: durable, continued, thinned, and clear when it is broken."""

import errno
import os
import resource
import signal
import sqlite3
import subprocess
import sys

import pytest

from launch.control import journal
from launch.control import protocol

Kind = protocol.EventKind


def _event(kind, time_s, step=None, **data):
  return protocol.Event(kind, 'worker', time_s, step, data)


def _progress(time_s):
  return _event(Kind.PROGRESS, time_s, step=int(time_s), done=int(time_s))


def _exited(time_s):
  return _event(
    Kind.WORKER_EXITED, time_s, attempt=1, process=0, exit_code=0, log_tail=''
  )


def test_a_second_writer_continues_the_first(tmp_path):
  path = str(tmp_path / 'journal.sqlite')
  first = _event(Kind.MESSAGE, 1.25, text='\ud800 \u00fc', loss=0.1 + 0.2)
  second = _event(Kind.RUN_STARTED, 2.0)
  for event in (first, second):
    log = journal.Journal(path)
    log.append([event])
    log.close()
  assert journal.read(path) == (first, second)


def test_a_written_event_survives_a_killed_writer(tmp_path):
  path = str(tmp_path / 'journal.sqlite')
  source = f"""
import os, signal
from launch.control import journal, protocol
log = journal.Journal({path!r})
event = protocol.Event(protocol.EventKind.RUN_STARTED, 'agent', 1.0, None, {{}})
log.append([event])
os.kill(os.getpid(), signal.SIGKILL)
"""
  process = subprocess.run([sys.executable, '-c', source], check=False)
  assert process.returncode == -signal.SIGKILL
  assert [event.kind for event in journal.read(path)] == [Kind.RUN_STARTED]


def test_progress_is_thinned_but_the_last_one_is_kept(tmp_path):
  log = journal.Journal(str(tmp_path / 'journal.sqlite'))
  for time_s in range(100, 135):
    log.append([_progress(time_s)])
  log.append([_exited(135)])
  log.append([_progress(136), _exited(137)])
  times = [event.time_s for event in log.read_all()]
  log.close()
  assert times == [100, 110, 120, 130, 134, 135, 136, 137]


def test_progress_is_kept_when_the_clock_is_set_back(tmp_path):
  log = journal.Journal(str(tmp_path / 'journal.sqlite'))
  log.append([_progress(1000.0), _progress(50.0), _progress(51.0)])
  times = [event.time_s for event in log.read_all()]
  log.close()
  assert times == [1000, 50]


def _other_table(path):
  with sqlite3.connect(path) as connection:
    connection.execute('CREATE TABLE events(id INTEGER)')
  connection.close()


def _unknown_kind(path):
  log = journal.Journal(path)
  log.append([_event(Kind.RUN_STARTED, 1.0)])
  log.close()
  with sqlite3.connect(path) as connection:
    connection.execute("UPDATE events SET kind = 'from_the_future'")
  connection.close()


def _cut_in_half(path):
  log = journal.Journal(path)
  log.append([_event(Kind.MESSAGE, 1.0, text='x' * 2000)] * 50)
  log.close()
  os.truncate(path, os.path.getsize(path) // 2)


def _text(path):
  with open(path, 'w') as file:
    file.write('no database')


@pytest.mark.parametrize(
  'make', [_text, os.mkdir, _other_table, _unknown_kind, _cut_in_half]
)
def test_a_broken_journal_is_named_with_a_remedy(tmp_path, make):
  path = str(tmp_path / 'journal.sqlite')
  make(path)

  def read():
    log = journal.Journal(path)
    try:
      log.read_all()
    finally:
      log.close()

  with pytest.raises(ValueError, match=r'journal\.sqlite is not.*move it away'):
    read()


def test_a_full_disk_is_told_as_such(tmp_path):
  log = journal.Journal(str(tmp_path / 'journal.sqlite'))
  # SQLite's own limit stands for the disk's: both are SQLITE_FULL.
  log._connection.execute('PRAGMA max_page_count=4')
  with pytest.raises(OSError, match=r'space.*journal\.sqlite') as caught:
    log.append([_event(Kind.MESSAGE, 1.0, text='x' * 100_000)])
  assert caught.value.errno == errno.ENOSPC
  log.append([_event(Kind.RUN_STARTED, 2.0)])
  assert [event.kind for event in log.read_all()] == [Kind.RUN_STARTED]
  log.close()


def test_a_used_up_quota_is_hinted_at(tmp_path):
  log = journal.Journal(str(tmp_path / 'journal.sqlite'))
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  # To SQLite a limit on the file's size is what a quota is: an I/O error.
  resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
  try:
    with pytest.raises(OSError, match='full, or a quota used up') as caught:
      log.append([_event(Kind.MESSAGE, 1.0, text='x' * 100_000)])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert caught.value.errno == errno.EIO
  log.close()


def test_reading_what_was_never_written_is_an_error(tmp_path):
  with pytest.raises(ValueError, match='no run was started'):
    journal.read(str(tmp_path / 'journal.sqlite'))
  assert not list(tmp_path.iterdir())
