"""A Slurm cluster of one's own: three nodes, all on this machine."""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time

NODES = ('n1', 'n2', 'n3')
_PATH = f'{os.environ.get("PATH", "")}:/usr/sbin:/sbin'
_PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scancel')

_CONF = """
ClusterName=jaxllm-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=2 RealMemory=100
"""


def missing():
  """Names of the programs that are not installed."""
  return [name for name in _PROGRAMS if not shutil.which(name, path=_PATH)]


def wait_for(condition):
  """Waits until `condition()` is true, and returns what it is."""
  deadline = time.monotonic() + 90
  while not (value := condition()):
    assert time.monotonic() < deadline, 'it did not come within 90 s'
    time.sleep(0.1)
  return value


class Cluster:
  """The cluster, as a context; `daemons` are its processes, by name."""

  def __init__(self, directory):
    self._directory = directory
    self.daemons = {}

  def __enter__(self):
    directory = self._directory
    (directory / 'state').mkdir()
    for name in NODES:
      (directory / f'spool-{name}').mkdir()
    key = directory / 'munge.key'
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    self._write_conf()
    try:
      self._start(
        'munged',
        *('--foreground', '--force', f'--key-file={key}'),
        f'--socket={directory}/munge.socket',
        f'--pid-file={directory}/munged.pid',
        f'--log-file={directory}/munged.log',
        f'--seed-file={directory}/munged.seed',
      )
      wait_for((directory / 'munge.socket').exists)
      self._start('slurmctld', '-D')
      for name in NODES:
        self.start_node(name)
      self.wait_for_nodes()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    if 'slurmctld' in self.daemons:
      self.run('scancel', '--user', _user(), check=False)
      self.run('scancel', '--signal=KILL', '--user', _user(), check=False)
    for daemon in reversed(self.daemons.values()):
      daemon.terminate()
    for daemon in self.daemons.values():
      try:
        daemon.wait(timeout=20)
      except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()

  def start_node(self, name):
    """Starts the daemon of a node."""
    self._start('slurmd', '-D', '-N', name, called=name)

  def lose_node(self, name):
    """Kills the daemon of a node; what it started goes on."""
    self.daemons[name].kill()
    self.daemons[name].wait()

  def wait_for_nodes(self):
    """Waits until all nodes are free."""

    def are_idle():
      for name, daemon in self.daemons.items():
        assert daemon.poll() is None, f'{name} ended, see {self._directory}'
      shown = self.run('sinfo', '--noheader', '--Node', '-o', '%T', check=False)
      return shown.split() == ['idle'] * len(NODES)

    wait_for(are_idle)

  def run(self, *command, check=True, **variables):
    """Runs a command, and returns what it printed."""
    result = subprocess.run(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=90,
      env=self._environment(variables),
    )
    assert not check or result.returncode == 0, result.stdout
    return result.stdout

  def job(self, job, field):
    """What `scontrol show job` says in a field, e.g. 'JobState'."""
    shown = self.run('scontrol', 'show', 'job', job)
    return dict(item.split('=', 1) for item in shown.split() if '=' in item)[
      field
    ]

  def wait(self, job):
    """Waits for a job's end, and returns its state and exit code."""
    ends = ('COMPLETED', 'FAILED', 'CANCELLED', 'NODE_FAIL', 'TIMEOUT')
    wait_for(lambda: self.job(job, 'JobState') in ends)
    code = self.job(job, 'ExitCode').partition(':')[0]
    return self.job(job, 'JobState'), int(code)

  def _write_conf(self):
    with contextlib.ExitStack() as stack:
      sockets = [stack.enter_context(socket.socket()) for _ in ('', *NODES)]
      for free in sockets:
        free.bind(('127.0.0.1', 0))
      ports = [free.getsockname()[1] for free in sockets]
    host = socket.gethostname().partition('.')[0]
    lines = [
      _CONF.format(
        host=host, port=ports[0], user=_user(), directory=self._directory
      ),
      *(
        f'NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}'
        for name, port in zip(NODES, ports[1:], strict=True)
      ),
      'PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n',
    ]
    (self._directory / 'slurm.conf').write_text('\n'.join(lines))

  def _start(self, program, *arguments, called=None):
    name = called or program
    with open(self._directory / f'{name}.out', 'a') as output:
      self.daemons[name] = subprocess.Popen(
        [shutil.which(program, path=_PATH), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=self._environment({}),
      )

  def _environment(self, variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith('SLURM')}
    conf = {'SLURM_CONF': str(self._directory / 'slurm.conf')}
    return {**kept, 'PATH': _PATH, **conf, **variables}


def _user():
  return pwd.getpwuid(os.getuid()).pw_name
