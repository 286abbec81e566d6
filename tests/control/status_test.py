"""The status of a run, while it runs and after."""

import re
import signal
import subprocess
import sys

from launch.control import status


def test_status_follows_a_run(launch):
  run = launch("""
train(0, 7)
sender.send(Kind.CHECKPOINT_SAVED, step=6)
sender.send(Kind.MESSAGE, text='ready')
wait_for_stop(20)
""")
  run.read_until('ready')
  text = status.describe(str(run.workdir))
  assert re.search(r'^state +running, attempt 1', text, re.MULTILINE)
  assert re.search(r'^step +6$', text, re.MULTILINE)
  assert re.search(r'^checkpoint +step 6$', text, re.MULTILINE)
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 0
  command = [sys.executable, '-m', 'launch.main', 'status']
  told = subprocess.run(
    [*command, f'--workdir={run.workdir}'],
    capture_output=True,
    text=True,
    check=True,
  )
  assert re.search(r'^state +done$', told.stdout, re.MULTILINE)
  assert re.search(r'^step +7$', told.stdout, re.MULTILINE)
  assert 'run_ended' in told.stdout


def test_a_run_that_failed_says_why(launch):
  run = launch("fail('the batch does not fit', 11)")
  assert run.finish() == 11
  text = status.describe(str(run.workdir))
  assert re.search(
    r'^state +out of memory: the batch does not fit$', text, re.MULTILINE
  )
  assert re.search(r'^step +none yet$', text, re.MULTILINE)
