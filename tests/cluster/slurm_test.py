"""slurm.sbatch on a real Slurm: who is who, signals, exit codes, lost nodes.

The launcher is a few lines of Python that write down what they were told.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from launch.control import schedulers
from tests.cluster import private_slurm
from tests.control import conftest

_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = str(_ROOT / 'launch' / 'cluster' / 'slurm.sbatch')

# PLAN says for each task how long it takes and how it ends, e.g. {"0": [1, 0]};
# the others wait for SIGTERM, save and end.
_LAUNCHER = """
import dataclasses, json, os, signal, sys, time
from launch.control import placement
signals = []
signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
given = dict.fromkeys(f.name for f in dataclasses.fields(placement.Given))
given['standby'] = False
rest = {}
for argument in sys.argv[1:]:
  name, equals, value = argument.removeprefix('--').partition('=')
  (given if name in given else rest)[name] = value if equals else True
for name in ('hosts', 'processes'):
  given[name] = given[name] and int(given[name])
found = placement.find(
  placement.Given(**given), os.environ, [], lambda name: ['192.0.2.1']
)
me = os.environ['SLURM_PROCID']
def write(**entries):
  path = os.path.join(os.environ['WORKDIR'], f'{me}.jsonl')
  with open(path, 'a') as file:
    file.write(json.dumps(entries) + '\\n')
write(rest=rest, pid=os.getpid(), **dataclasses.asdict(found))
seconds, code = json.loads(os.environ.get('PLAN', '{}')).get(me, (None, 13))
start = time.monotonic()
while not signals and (seconds is None or time.monotonic() < start + seconds):
  time.sleep(0.05)
if signals:
  time.sleep(0.5)
  code = 13
write(signals=signals)
sys.exit(code)
"""


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
  if missing := private_slurm.missing():
    pytest.skip(
      f'{", ".join(missing)} not installed; on Debian: apt-get install '
      'slurm-wlm munge'
    )
  with private_slurm.Cluster(tmp_path_factory.mktemp('slurm')) as cluster:
    yield cluster


class Job:
  """A job, by default of slurm.sbatch, with a workdir of its own."""

  def __init__(self, cluster, directory, *arguments, nodes, **variables):
    self._cluster = cluster
    self._directory = directory
    self.log_path = directory / 'log'
    launcher = directory / 'launcher.py'
    launcher.write_text(_LAUNCHER)
    settings = {
      'CONFIG': 'configs/quickstart.py',
      'WORKDIR': str(directory),
      'LAUNCH': f'{sys.executable} {launcher}',
      'PYTHONPATH': str(_ROOT),
      **variables,
    }
    self.id = cluster.run(
      *('sbatch', '--parsable', f'--nodes={nodes}', '--time=10'),
      f'--output={self.log_path}',
      *(arguments if '--wrap' in arguments else (_SCRIPT, *arguments)),
      **settings,
    ).strip()

  def told(self, task):
    """What a task wrote down so far."""
    path = self._directory / f'{task}.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]

  def wait_for_start(self, tasks):
    private_slurm.wait_for(lambda: all(map(self.told, range(tasks))))

  def wait(self):
    return self._cluster.wait(self.id)


@pytest.fixture
def submit(cluster, tmp_path):
  def submit(*arguments, nodes, **variables):
    return Job(cluster, tmp_path, *arguments, nodes=nodes, **variables)

  yield submit
  cluster.wait_for_nodes()


def test_the_script_is_bash():
  subprocess.run(['bash', '-n', _SCRIPT], check=True)


def test_every_task_learns_its_place(submit):
  plan = json.dumps({'0': [0, 0], '1': [0, 0], '2': [0, 0]})
  job = submit(
    *('--processes=2', '--config.sample.prompts=("a b",)'),
    nodes=3,
    STANDBYS='1',
    PLAN=plan,
  )
  assert job.wait() == ('COMPLETED', 0)
  told = [job.told(task)[0] for task in range(3)]
  assert [each['host'] for each in told] == [0, 1, None]
  coordinator = f'n1:{61440 + int(job.id) % 4096}'
  for each in told:
    assert each['hosts'] == 2
    assert each['coordinator'] == coordinator
    assert each['bind'] == (coordinator if each['host'] == 0 else '')
    assert each['rest'].pop('workdir')
    assert each['rest'] == {
      'config': 'configs/quickstart.py',
      'config.sample.prompts': '("a b",)',
    }


@pytest.mark.parametrize(
  ('command', 'hosts'), [('', 1), ('srun --ntasks=2 --nodes=1', 2)]
)
def test_tasks_that_srun_starts_count(submit, command, hosts):
  """A batch script alone is one launcher, whatever the job asked for."""
  job = submit(
    *('--ntasks=2', '--wrap', f'{command} $LAUNCH'),
    nodes=1,
    PLAN='{"0": [0, 0], "1": [0, 0]}',
  )
  assert job.wait() == ('COMPLETED', 0)
  told = [job.told(task)[0] for task in range(hosts)]
  assert [each['host'] for each in told] == list(range(hosts))
  assert {each['hosts'] for each in told} == {hosts}
  assert bool(told[0]['coordinator']) == (hosts > 1)


def test_launcher_0_tells_how_the_run_ended(submit):
  job = submit(nodes=2, PLAN='{"0": [0.5, 11], "1": [0, 0]}')
  assert job.wait() == ('FAILED', 11)


def test_a_lost_launcher_does_not_end_the_others(submit):
  job = submit(nodes=2, PLAN='{"0": [2, 0], "1": [0, 9]}')
  assert job.wait() == ('COMPLETED', 0)
  assert job.told(0)[-1] == {'signals': []}
  assert 'launcher on n2: exit code 9' in job.log_path.read_text()


def test_a_lost_node_does_not_end_the_others(cluster, submit):
  job = submit(nodes=3, PLAN='{"0": [15, 0], "2": [15, 0]}')
  job.wait_for_start(3)
  cluster.lose_node('n2')
  task = job.told(1)[0]['pid']
  shell = _parent(task)
  for pid in (_parent(shell), shell, task):
    os.kill(pid, signal.SIGKILL)
  try:
    assert job.wait() == ('COMPLETED', 0)
    assert job.told(2)[-1] == {'signals': []}
    assert 'Node failure on n2' in job.log_path.read_text()
  finally:
    cluster.start_node('n2')


@pytest.mark.parametrize(
  ('cancel', 'state'),
  [
    (['--signal=TERM', '--batch'], 'FAILED'),
    # Slurm ends what is left after KillWait, 30 s.
    ([], 'CANCELLED'),
  ],
)
def test_a_run_that_is_cancelled_saves(cluster, submit, cancel, state):
  job = submit(nodes=2)
  job.wait_for_start(2)
  cluster.run('scancel', *cancel, job.id)
  assert job.wait() == (state, 13)
  assert [job.told(task)[-1] for task in range(2)] == [
    {'signals': [signal.SIGTERM]}
  ] * 2
  assert 'scancel: error' not in job.log_path.read_text()


def test_the_time_limit_saves_and_continues(cluster, submit):
  job = submit(nodes=2, REQUEUE='1')
  job.wait_for_start(2)
  # What --signal=B:USR1@... does at the limit.
  cluster.run('scancel', '--signal=USR1', '--batch', job.id)
  private_slurm.wait_for(lambda: cluster.job(job.id, 'Restarts') == '1')
  assert job.told(0)[-1] == {'signals': [signal.SIGTERM]}
  cluster.run('scontrol', 'update', f'JobId={job.id}', 'StartTime=now')
  private_slurm.wait_for(lambda: len(job.told(0)) == len(job.told(1)) == 3)
  again, before = job.told(1)[-1], job.told(1)[0]
  assert {**again, 'pid': 0} == {**before, 'pid': 0}
  cluster.run('scancel', '--signal=TERM', '--batch', job.id)
  assert job.wait() == ('FAILED', 13)


def test_without_requeue_the_time_limit_ends_the_job(cluster, submit):
  job = submit(nodes=1)
  job.wait_for_start(1)
  cluster.run('scancel', '--signal=USR1', '--batch', job.id)
  assert job.wait() == ('FAILED', 13)
  assert job.told(0)[-1] == {'signals': [signal.SIGTERM]}


def test_the_real_launcher_replaces_a_host(submit, tmp_path):
  """Only the workers are few lines: they wait once, then train."""
  worker = tmp_path / 'worker.py'
  worker.write_text(
    conftest.WORKER
    + """
with open(f'{workdir}/parent{process}', 'w') as file:
  file.write(str(os.getppid()))
if life == 1:
  sender.send(Kind.MESSAGE, text='ready')
  wait_for_stop(60)
train(0, 10)
"""
  )
  launcher = tmp_path / 'real_launcher.py'
  launcher.write_text(
    'import sys\nfrom launch import main\n'
    f'sys.exit(main.run(sys.argv, [sys.executable, {str(worker)!r}]))\n'
  )
  config = tmp_path / 'config.py'
  config.write_text(conftest.CONFIG)
  workdir = tmp_path / 'run'
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  job = submit(
    # The nodes' names have no addresses on this machine.
    f'--coordinator=127.0.0.1:{port}',
    '--config.launch.heartbeat_timeout_s=6.0',
    nodes=3,
    STANDBYS='1',
    CONFIG=str(config),
    WORKDIR=str(workdir),
    LAUNCH=f'{sys.executable} {launcher}',
  )
  parent = workdir / 'parent1'
  private_slurm.wait_for(lambda: parent.exists() and parent.read_text())
  os.kill(int(parent.read_text()), signal.SIGKILL)
  assert job.wait() == ('COMPLETED', 0)
  log = job.log_path.read_text()
  assert 'launcher on n2: exit code 137' in log
  assert '2: taking the place of host 1' in log


@pytest.mark.parametrize(
  ('variables', 'text'),
  [
    (dict(STANDBYS='2'), 'error: STANDBYS=2 leaves none of 2 nodes'),
    (dict(CONFIG=''), 'error: CONFIG= WORKDIR='),
    (dict(WORKDIR=''), 'WORKDIR=: export both'),
  ],
)
def test_mistakes_are_named(submit, variables, text):
  job = submit(nodes=2, **variables)
  assert job.wait() == ('FAILED', 2)
  assert text in job.log_path.read_text()


@pytest.mark.parametrize(
  'short', ['n[001-004,007],gpu3', 'a[1-2]b[3-4]', 'n[08-10,3],gpu1', 'x']
)
def test_host_lists_are_read_as_slurm_reads_them(cluster, short):
  shown = cluster.run('scontrol', 'show', 'hostnames', short)
  assert schedulers.expand(short) == shown.split()


def _parent(pid):
  return int(pathlib.Path(f'/proc/{pid}/stat').read_text().split()[3])
