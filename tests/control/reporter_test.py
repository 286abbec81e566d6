"""The worker's end of the pipe: whole lines, and no harm when nobody reads."""

import os
import threading

import pytest

from launch.control import protocol
from launch.worker import reporter


@pytest.fixture
def pipe():
  read_fd, write_fd = os.pipe()
  with open(read_fd, 'rb') as reader:
    yield reader, write_fd
  os.close(write_fd)


def test_an_event_arrives(pipe):
  reader, write_fd = pipe
  sender = reporter.Reporter(write_fd, 0)
  sender.send(protocol.EventKind.PROGRESS, step=3, done=3, loss=0.1)
  event = protocol.decode(reader.readline())
  assert (event.source, event.step) == ('worker', 3)
  assert event.data == {'done': 3, 'loss': 0.1}
  assert sender.connected


def test_threads_do_not_mix_their_lines(pipe):
  reader, write_fd = pipe
  sender = reporter.Reporter(write_fd, 0)

  def send(letter):
    for _ in range(20):
      # Longer than what the kernel writes to a pipe in one piece.
      sender.send(protocol.EventKind.MESSAGE, text=letter * 30_000)

  threads = [threading.Thread(target=send, args=(x,)) for x in 'abcd']
  for thread in threads:
    thread.start()
  lines = [reader.readline() for _ in range(80)]
  for thread in threads:
    thread.join()
  texts = [protocol.decode(line).data['text'] for line in lines]
  assert sorted(text[0] for text in texts) == sorted('abcd' * 20)
  assert {len(set(text)) for text in texts} == {1}


def test_it_notices_that_the_reader_is_gone_without_writing(pipe):
  reader, write_fd = pipe
  sender = reporter.Reporter(write_fd, 0)
  assert sender.connected
  reader.close()
  assert not sender.connected
  sender.send(protocol.EventKind.MESSAGE, text='nobody hears this')


def test_a_send_notices_that_the_reader_is_gone(pipe):
  reader, write_fd = pipe
  sender = reporter.Reporter(write_fd, 0)
  reader.close()
  sender.send(protocol.EventKind.MESSAGE, text='nobody hears this')
  assert not sender.connected


def test_a_long_traceback_fits_into_a_line(pipe):
  reader, write_fd = pipe
  sender = reporter.Reporter(write_fd, 0)
  traceback = 'begin' + '\u4e16' * 500_000 + 'end'
  thread = threading.Thread(
    target=sender.send,
    args=(protocol.EventKind.ERROR,),
    kwargs={'text': 'x' * 500_000, 'exit_code': 1, 'traceback': traceback},
  )
  thread.start()
  line = reader.readline()
  thread.join()
  assert len(line) <= protocol.MAX_LINE_BYTES
  received = protocol.decode(line).data['traceback']
  assert received.startswith('begin')
  assert received.endswith('end')


def test_children_of_the_worker_do_not_inherit_the_pipe(pipe):
  _, write_fd = pipe
  os.set_inheritable(write_fd, True)
  reporter.Reporter(write_fd, 0)
  assert not os.get_inheritable(write_fd)
