"""What Open MPI, Slurm or our Kubernetes JobSet says of a launcher.

Each of them starts one launcher per task and tells it so by its environment.

Open MPI is asked first, for `mpirun` in a Slurm job starts its daemons with
srun, and their tasks inherit the variables of that step.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import ipaddress
import itertools
import re
import zlib

# Ports for a job's coordinator: above those that Linux gives to outgoing
# connections (32768 to 60999).
_FIRST_PORT = 61440
_NUM_PORTS = 4096

_REMEDY = 'pass --coordinator=ADDRESS:PORT, an address of host 0'


@dataclasses.dataclass(frozen=True)
class Task:
  """What a scheduler says.

  Attributes:
    scheduler: its name.
    hosts: its tasks, i.e. launchers.
    host: number of this one; None where the scheduler did not number it.
    standbys_apart: whether `hosts` leaves out standbys, which may come all the
      same. Other schedulers do not know which of their tasks are standbys.
    local_hosts: launchers on this machine.
    local_host: number of this one among them.
    coordinator: gives 'ADDRESS:PORT' of host 0; may raise ValueError.
    resolves_later: whether that name may be unknown until host 0 runs.
  """

  scheduler: str
  hosts: int
  host: int | None
  standbys_apart: bool
  local_hosts: int
  local_host: int
  coordinator: Callable[[], str]
  resolves_later: bool


def find_task(environment: Mapping[str, str]) -> Task | None:
  """Reads what a scheduler says of this launcher; None if none started it.

  Raises:
    ValueError: a variable has no value that its scheduler would give it.
  """
  number = functools.partial(_number, environment)
  if {'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK'} <= environment.keys():
    return Task(
      scheduler='Open MPI',
      hosts=number('OMPI_COMM_WORLD_SIZE'),
      host=number('OMPI_COMM_WORLD_RANK'),
      standbys_apart=False,
      local_hosts=number('OMPI_COMM_WORLD_LOCAL_SIZE'),
      local_host=number('OMPI_COMM_WORLD_LOCAL_RANK'),
      coordinator=functools.partial(_open_mpi_coordinator, environment),
      resolves_later=False,
    )
  # A batch script that does not call srun has the job's variables, but not the
  # step's: it is one launcher, however many tasks the job may start.
  if {'SLURM_STEP_NUM_TASKS', 'SLURM_PROCID'} <= environment.keys():
    return Task(
      scheduler='Slurm',
      hosts=number('SLURM_STEP_NUM_TASKS'),
      host=number('SLURM_PROCID'),
      standbys_apart=False,
      local_hosts=_slurm_local_tasks(environment),
      local_host=number('SLURM_LOCALID'),
      coordinator=functools.partial(_slurm_coordinator, environment),
      resolves_later=False,
    )
  # Kubernetes sets the index, launch/cluster/jobset.yaml the others.
  if {'LAUNCH_HOSTS', 'LAUNCH_COORDINATOR'} <= environment.keys():
    return Task(
      scheduler='JobSet',
      hosts=number('LAUNCH_HOSTS'),
      host=(
        number('JOB_COMPLETION_INDEX')
        if 'JOB_COMPLETION_INDEX' in environment
        else None
      ),
      standbys_apart=True,
      local_hosts=1,
      local_host=0,
      coordinator=lambda: environment['LAUNCH_COORDINATOR'],
      resolves_later=True,
    )
  return None


def expand(host_list: str) -> list[str]:
  """Names of Slurm's short form: 'n[08-10,3],gpu1' is n08 n09 n10 n3 gpu1.

  Raises:
    ValueError: when it is no such list.
  """
  items = re.findall(r'(?:[^\s,\[\]]|\[[\d,-]+\])+', host_list)
  if ','.join(items) != host_list or not items:
    raise ValueError(f'{host_list!r} is no list of hosts')
  names = []
  for item in items:
    texts = re.split(r'\[(.*?)\]', item)  # every other one was in brackets
    choices = [
      _expand_numbers(text) if i % 2 else [text] for i, text in enumerate(texts)
    ]
    names += map(''.join, itertools.product(*choices))
  return names


def _open_mpi_coordinator(environment: Mapping[str, str]) -> str:
  """Where mpirun was called, if host 0 is there.

  Open MPI 4: OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,10.8.0.1:34911
  Open MPI 5: PMIX_NAMESPACE=prterun-node1-2715@1

  PMIX_SERVER_URI2, 1531576320.3;tcp4://127.0.0.1:56233 or
  prterun-node1-2715@0.3;tcp4://..., is the daemon of this machine, and number 0
  of them is mpirun itself.
  """
  daemon = re.match(r'[^;]*\.(\d+);', environment.get('PMIX_SERVER_URI2', ''))
  if environment['OMPI_COMM_WORLD_RANK'] == '0' and daemon and daemon[1] != '0':
    raise ValueError(
      f'mpirun was not called on host 0, so that it cannot say where that is; '
      f'{_REMEDY}'
    )
  uri = environment.get('OMPI_MCA_orte_hnp_uri', '')
  run = environment.get('PMIX_NAMESPACE', uri)
  addresses = []
  for listed in re.findall(r'tcp6?://\[?([^\[\];]+?)\]?:\d+(?=;|$)', uri):
    addresses += listed.split(',')
  addresses.sort(key=_is_local)  # stable: these come last
  if node := re.fullmatch(r'[a-z]+-(.+)-\d+@\d+', run):
    addresses.append(node[1])
  if not addresses:
    raise ValueError(
      f'Open MPI does not say where mpirun was called; {_REMEDY}'
    )
  port = _FIRST_PORT + zlib.crc32(run.encode()) % _NUM_PORTS
  return join(addresses[0], port)


def _slurm_coordinator(environment: Mapping[str, str]) -> str:
  try:
    first = expand(environment.get('SLURM_STEP_NODELIST', ''))[0]
  except ValueError as error:
    raise ValueError(f'SLURM_STEP_NODELIST: {error}; {_REMEDY}') from error
  here = environment.get('SLURMD_NODENAME', first)
  if environment['SLURM_PROCID'] == '0' and here != first:
    raise ValueError(
      f'task 0 of Slurm runs on {here}, not on the first node of '
      f'SLURM_STEP_NODELIST, {first}; {_REMEDY}'
    )
  port = _FIRST_PORT + _number(environment, 'SLURM_JOB_ID') % _NUM_PORTS
  return join(first, port)


def join(address: str, port: int) -> str:
  """'ADDRESS:PORT', with brackets around an IPv6 address."""
  return f'[{address}]:{port}' if ':' in address else f'{address}:{port}'


def _slurm_local_tasks(environment: Mapping[str, str]) -> int:
  """Tasks on this node: SLURM_STEP_TASKS_PER_NODE is '2(x3),1', for example."""
  value = environment.get('SLURM_STEP_TASKS_PER_NODE', '')
  tasks = []
  for item in value.split(','):
    match = re.fullmatch(r'(\d+)(?:\(x(\d+)\))?', item)
    if match is None:
      raise ValueError(_explain('SLURM_STEP_TASKS_PER_NODE', value))
    tasks += [int(match[1])] * int(match[2] or 1)
  node = _number(environment, 'SLURM_NODEID')
  if node >= len(tasks):
    raise ValueError(_explain('SLURM_NODEID', str(node)))
  return tasks[node]


def _expand_numbers(ranges: str) -> list[str]:
  """'08-10,3' is 08 09 10 3."""
  numbers = []
  for item in ranges.split(','):
    match = re.fullmatch(r'(\d+)(?:-(\d+))?', item)
    if match is None:
      raise ValueError(f'[{ranges}] is no list of numbers')
    first, last = match[1], match[2] or match[1]
    numbers += [
      f'{number:0{len(first)}d}' for number in range(int(first), int(last) + 1)
    ]
  return numbers


def _number(environment: Mapping[str, str], name: str) -> int:
  value = environment.get(name)
  if value is None or not re.fullmatch(r'\d+', value, re.ASCII):
    raise ValueError(_explain(name, value))
  return int(value)


def _explain(name: str, value: str | None) -> str:
  return (
    f'{name} is {value!r}, which is not what its scheduler writes; remove what '
    'set it, or start the launcher without that scheduler'
  )


def _is_local(address: str) -> bool:
  """Whether it means nothing, or another host, elsewhere."""
  ip = ipaddress.ip_address(address)
  return ip.is_loopback or ip.is_link_local
