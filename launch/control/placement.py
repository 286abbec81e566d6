"""Where a launcher stands among its peers: which host of how many, which GPUs.

The same command runs on every host. What its flags leave open comes from the
scheduler that started it; where none did, the run has one host.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import ipaddress
import itertools
import os
import re
import socket

from launch.control import schedulers


@dataclasses.dataclass(frozen=True)
class Given:
  """The flags of these names; None where one was not given."""

  hosts: int | None
  host: int | None
  standby: bool
  coordinator: str | None
  bind: str | None
  processes: int | None
  devices: str | None


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where a launcher stands.

  Attributes:
    hosts: launchers of the run, standbys not among them.
    host: number of this one; None for a standby.
    coordinator: 'ADDRESS:PORT' where host 0 is reached, an IPv6 address in
      brackets; '' where no other launcher may come.
    bind: 'ADDRESS:PORT' where host 0 listens; '' on the others.
    processes: workers that this launcher starts.
    devices: the GPUs of each worker, as CUDA_VISIBLE_DEVICES writes them, e.g.
      ('0,1', '2,3'); () leaves them to jax.
  """

  hosts: int
  host: int | None
  coordinator: str
  bind: str
  processes: int
  devices: tuple[str, ...]


def find(
  given: Given,
  environment: Mapping[str, str],
  gpus: Sequence[str],
  resolve: Callable[[str], list[str]],
) -> Placement:
  """Finds the place of this launcher.

  Args:
    given: what the user typed, which wins.
    environment: of this launcher.
    gpus: names of the GPUs on this host.
    resolve: gives the addresses of a host's name; may raise OSError.

  Raises:
    ValueError: what was given is wrong, or leaves something open.
  """
  task = schedulers.find_task(environment)
  hosts = _hosts(given, task)
  host = None if given.standby else _host(given, hosts, task)
  processes = 1 if given.processes is None else given.processes
  if processes < 1:
    raise ValueError(
      f'--processes={processes}; pass 1 or more, or leave it out for 1'
    )
  if hosts == 1 and not _others_may_come(given, task):
    coordinator = bind = ''
    if given.bind is not None:
      raise ValueError(
        f'--bind={given.bind} is for runs on several hosts; leave it out, or '
        'pass --hosts, --host and --coordinator, too'
      )
  else:
    coordinator = _coordinator(given, host, task, resolve)
    bind = _bind(given, coordinator)
  return Placement(
    hosts=hosts,
    host=host,
    coordinator=coordinator,
    bind=bind if host == 0 else '',
    processes=processes,
    devices=_devices(given.devices, environment, gpus, processes, task),
  )


def local_gpus(directory: str) -> list[str]:
  """Names of the GPUs among the devices in a directory, in order.

  Args:
    directory: '/dev', which holds nvidia0 for the first GPU.
  """
  names = [n for n in os.listdir(directory) if re.fullmatch(r'nvidia\d+', n)]
  return sorted(names, key=lambda name: int(name.removeprefix('nvidia')))


def resolve(name: str) -> list[str]:
  """The addresses of a host's name; raises OSError where it has none."""
  return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})


def split(endpoint: str) -> tuple[str, int]:
  """Address and port: '[::1]:80' is ('::1', 80).

  Raises:
    ValueError: when it is none of NAME:PORT, IPV4:PORT and [IPV6]:PORT.
  """
  match = re.fullmatch(r'(?:\[(.*)\]|([\w.-]+)):(\d{1,5})', endpoint, re.ASCII)
  if match is None and _is_ipv6(endpoint):
    raise ValueError(f'{endpoint} is an IPv6 address without brackets or port')
  if match is None and ':' not in endpoint.rpartition(']')[2]:
    raise ValueError(f'{endpoint} has no port')
  if match is None or (match[1] is not None and not _is_ipv6(match[1])):
    raise ValueError(f'{endpoint} is no address with a port')
  if not 1 <= int(match[3]) <= 65535:
    raise ValueError(f'{endpoint} has a port outside of 1 to 65535')
  return match[1] or match[2], int(match[3])


def _hosts(given: Given, task: schedulers.Task | None) -> int:
  if given.standby and given.host is not None:
    raise ValueError(
      f'--host={given.host} and --standby exclude each other; a standby gets '
      'the number of the host that it replaces'
    )
  if given.hosts is not None:
    if given.hosts < 1:
      raise ValueError(
        f'--hosts={given.hosts}; pass the number of hosts, 1 or more'
      )
    return given.hosts
  if given.standby and not (task and task.standbys_apart):
    raise ValueError(
      '--standby without --hosts; pass --hosts=N, the number of hosts without '
      'standbys, on all of them'
    )
  if task is not None:
    return task.hosts
  for flag, value in (
    ('host', given.host),
    ('coordinator', given.coordinator),
  ):
    if value is not None:
      raise ValueError(
        f'--{flag}={value} without --hosts; pass --hosts=N, the number of hosts'
      )
  return 1


def _host(given: Given, hosts: int, task: schedulers.Task | None) -> int:
  if given.host is not None:
    host, source = given.host, f'--host={given.host}'
  elif task is not None and task.host is not None:
    host, source = task.host, f'task {task.host} of {task.scheduler}'
  elif hosts == 1:
    return 0
  else:
    raise ValueError(
      f'{hosts} hosts without --host; pass --host=I, another number from 0 to '
      f'{hosts - 1} on each host'
    )
  if not 0 <= host < hosts:
    raise ValueError(
      f'{source} is not among the {hosts} hosts, which are numbered from 0 to '
      f'{hosts - 1}; correct --hosts or the number, or pass --standby there'
    )
  return host


def _others_may_come(given: Given, task: schedulers.Task | None) -> bool:
  """Whether a run on one host has standbys, as far as can be told."""
  if given.standby or given.coordinator is not None:
    return True
  if task is None or given.host is not None:
    return False
  return task.standbys_apart or task.hosts > 1


def _coordinator(
  given: Given,
  host: int | None,
  task: schedulers.Task | None,
  resolve: Callable[[str], list[str]],
) -> str:
  if given.coordinator is not None:
    address, port = _split_value('--coordinator', given.coordinator)
    if address in ('0.0.0.0', '::'):
      raise ValueError(
        f'--coordinator={given.coordinator} is no address to reach host 0 at; '
        f'pass one of its own, and --bind={given.coordinator} to listen at all'
      )
    if host == 0 and given.bind is None and not _is_loopback(address):
      # Else host 0 would listen where no other host can reach it.
      _refuse_loopback(
        address,
        _addresses(resolve, address),
        '--bind=ADDRESS of this host, or --bind=0.0.0.0 for all that it has',
      )
    return schedulers.join(address, port)
  if task is None:
    raise ValueError(
      'several hosts without --coordinator; pass --coordinator=ADDRESS:PORT, '
      'where all hosts reach host 0, e.g. --coordinator=10.0.0.1:8476'
    )
  address, port = _split_value('LAUNCH_COORDINATOR', task.coordinator())
  on_one_machine = task.local_hosts == task.hosts and not task.standbys_apart
  if not on_one_machine:
    remedy = '--coordinator=ADDRESS:PORT, an address of host 0 for all hosts'
    if _is_loopback(address):
      _refuse_loopback(address, [address], remedy)
    if not task.resolves_later:
      addresses = _addresses(resolve, address)
      if not addresses:
        raise ValueError(
          f'{address}, host 0 as {task.scheduler} names it, has no address on '
          f'this host; pass {remedy}'
        )
      if host != 0 or given.bind is None:
        _refuse_loopback(address, addresses, remedy)
  return schedulers.join(address, port)


def _refuse_loopback(address: str, addresses: list[str], remedy: str) -> None:
  # Debian maps a host's own name to 127.0.1.1.
  if addresses and all(map(_is_loopback, addresses)):
    raise ValueError(
      f'{address} is {addresses[0]} on this host (see /etc/hosts), where no '
      f'other host reaches it; pass {remedy}'
    )


def _bind(given: Given, coordinator: str) -> str:
  if given.bind is None:
    return coordinator
  text = given.bind
  if re.fullmatch(r'\[.*\]|[\w.-]+', text):  # has no port
    text = f'{text}:{split(coordinator)[1]}'
  return schedulers.join(*_split_value('--bind', text))


def _devices(
  typed: str | None,
  environment: Mapping[str, str],
  gpus: Sequence[str],
  processes: int,
  task: schedulers.Task | None,
) -> tuple[str, ...]:
  """The GPUs of each worker; () leaves them to jax."""
  visible = environment.get('CUDA_VISIBLE_DEVICES')
  launchers, launcher = 1, 0
  if typed is not None:
    source, devices = f'--devices={typed}', typed.split(',')
    if len(set(devices)) < len(devices) or not all(map(_is_gpu, devices)):
      raise ValueError(
        f'{source}; pass different numbers or UUIDs of GPUs, e.g. --devices=2,3'
      )
  elif not _uses_gpus(environment):
    return ()
  elif visible is not None:
    # The scheduler's, for this launcher alone. CUDA ignores what follows the
    # first id that it does not know, -1 and NoDevFiles for example.
    source = f'CUDA_VISIBLE_DEVICES={visible}'
    devices = list(itertools.takewhile(_is_gpu, visible.split(',')))
  else:
    # A container's first GPU may be nvidia2: CUDA counts from 0.
    source, devices = 'this host', [str(i) for i in range(len(gpus))]
    if task is not None:
      launchers, launcher = task.local_hosts, task.local_host
  shares = launchers * processes
  if typed is None and (shares == 1 or not devices):
    return ()
  size, rest = divmod(len(devices), shares)
  if rest or not size:
    each = f'{launchers} launchers with ' if launchers > 1 else ''
    raise ValueError(
      f'{source} has {len(devices)} GPUs, which {each}--processes={processes} '
      'cannot share evenly; pass another --processes, or --devices=LIST with '
      'as many GPUs as workers or a multiple of that'
    )
  first = launcher * processes
  return tuple(
    ','.join(devices[i * size : (i + 1) * size])
    for i in range(first, first + processes)
  )


def _uses_gpus(environment: Mapping[str, str]) -> bool:
  platforms = environment.get('JAX_PLATFORMS', '')
  return not platforms or bool({'cuda', 'gpu'} & set(platforms.split(',')))


def _split_value(name: str, value: str) -> tuple[str, int]:
  try:
    return split(value)
  except ValueError as error:
    raise ValueError(
      f'{name}={error}; write ADDRESS:PORT, e.g. 10.0.0.1:8476 or '
      '[fd00::1]:8476'
    ) from error


def _addresses(resolve: Callable[[str], list[str]], name: str) -> list[str]:
  try:
    return resolve(name)
  except OSError:
    return []


def _is_gpu(device: str) -> bool:
  return re.fullmatch(r'\d+|(GPU|MIG)-[\w./-]+', device, re.ASCII) is not None


def _is_ipv6(address: str) -> bool:
  try:
    ipaddress.IPv6Address(address)
  except ValueError:
    return False
  return True


def _is_loopback(address: str) -> bool:
  try:
    return ipaddress.ip_address(address).is_loopback
  except ValueError:
    return address == 'localhost' or address.endswith('.localhost')
