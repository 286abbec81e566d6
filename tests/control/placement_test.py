"""A launcher's place: flags win, schedulers fill in, mistakes are named."""

import re
import socket

import pytest

from launch.control import placement

_SLURM = {
  'SLURM_JOB_ID': '70012',
  'SLURM_LOCALID': '0',
  'SLURM_NODEID': '1',
  'SLURM_PROCID': '1',
  'SLURM_STEP_NODELIST': 'node[001-003]',
  'SLURM_STEP_NUM_TASKS': '3',
  'SLURM_STEP_TASKS_PER_NODE': '1(x3)',
  'SLURMD_NODENAME': 'node002',
}
_SLURM_FIRST = {
  **_SLURM,
  'SLURM_NODEID': '0',
  'SLURM_PROCID': '0',
  'SLURMD_NODENAME': 'node001',
}
_OPEN_MPI = {
  'OMPI_COMM_WORLD_LOCAL_RANK': '1',
  'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
  'OMPI_COMM_WORLD_RANK': '1',
  'OMPI_COMM_WORLD_SIZE': '4',
  'PMIX_NAMESPACE': 'prterun-node001-2715@1',
}
_JOBSET = {
  'JOB_COMPLETION_INDEX': '1',
  'LAUNCH_COORDINATOR': 'jaxllm-workers-0-0.jaxllm:8476',
  'LAUNCH_HOSTS': '2',
}
_NAMES = {'node001': ['10.1.0.1'], 'localhost': ['127.0.0.1', '::1']}


def _find(environment, *, gpus=0, names=_NAMES, **flags):
  given = dict(
    hosts=None,
    host=None,
    standby=False,
    coordinator=None,
    bind=None,
    processes=None,
    devices=None,
  )

  def resolve(name):
    if name not in names:
      raise socket.gaierror(f'{name} is unknown')
    return names[name]

  return placement.find(
    placement.Given(**{**given, **flags}),
    environment,
    [f'nvidia{i}' for i in range(gpus)],
    resolve,
  )


def _refuse(pattern, environment, **arguments):
  with pytest.raises(ValueError, match=pattern) as caught:
    _find(environment, **arguments)
  assert '\n' not in str(caught.value)


def test_nothing_given_is_one_host():
  assert _find({}) == placement.Placement(
    hosts=1, host=0, coordinator='', bind='', processes=1, devices=()
  )


def test_hosts_by_hand():
  flags = dict(hosts=2, coordinator='10.1.0.1:8476', processes=3)
  first, second = (_find({}, host=host, **flags) for host in (0, 1))
  assert first.bind == first.coordinator == second.coordinator
  assert first.coordinator == '10.1.0.1:8476'
  assert (first.host, second.host) == (0, 1)
  assert (first.hosts, second.hosts) == (2, 2)
  assert second.bind == ''
  assert second.processes == 3


@pytest.mark.parametrize(
  ('environment', 'place', 'coordinator'),
  [
    (_SLURM, (3, 1), 'node001:61820'),
    (_SLURM_FIRST, (3, 0), 'node001:61820'),
    (_OPEN_MPI, (4, 1), 'node001:63578'),
    (_JOBSET, (2, 1), 'jaxllm-workers-0-0.jaxllm:8476'),
  ],
)
def test_a_scheduler_says_it_all(environment, place, coordinator):
  found = _find(environment)
  assert (found.hosts, found.host) == place
  assert found.coordinator == coordinator
  assert found.bind == (coordinator if found.host == 0 else '')


def test_flags_beat_the_scheduler():
  found = _find(_SLURM, hosts=8, host=5, coordinator='10.9.9.9:7000')
  assert (found.hosts, found.host) == (8, 5)
  assert found.coordinator == '10.9.9.9:7000'


def test_one_task_of_a_scheduler_is_one_host():
  one = {**_SLURM_FIRST, 'SLURM_STEP_NUM_TASKS': '1'}
  assert _find(one).coordinator == ''


def test_tasks_with_standbys_among_them():
  """The first two of three tasks run, the third one waits."""
  first = _find(_SLURM_FIRST, hosts=2)
  standby = _find({**_SLURM, 'SLURM_PROCID': '2'}, hosts=2, standby=True)
  assert (first.hosts, first.host, first.bind) == (2, 0, 'node001:61820')
  assert (standby.hosts, standby.host, standby.bind) == (2, None, '')
  assert standby.coordinator == first.coordinator


def test_one_host_listens_for_its_standbys():
  assert _find(_SLURM_FIRST, hosts=1).coordinator == 'node001:61820'
  assert _find({}, hosts=1, coordinator='10.1.0.1:80').bind == '10.1.0.1:80'
  alone = {**_JOBSET, 'LAUNCH_HOSTS': '1', 'JOB_COMPLETION_INDEX': '0'}
  assert _find(alone).bind == _JOBSET['LAUNCH_COORDINATOR']
  assert _find(_JOBSET, standby=True).host is None


@pytest.mark.parametrize(
  ('given', 'bind'),
  [
    ('0.0.0.0', '0.0.0.0:8476'),
    ('0.0.0.0:90', '0.0.0.0:90'),
    ('[::]', '[::]:8476'),
    ('[::1]:90', '[::1]:90'),
    ('node001', 'node001:8476'),
  ],
)
def test_where_host_0_listens(given, bind):
  flags = dict(hosts=2, coordinator='[fd00::1]:8476', bind=given)
  assert _find({}, host=0, **flags).bind == bind
  assert _find({}, host=1, **flags).bind == ''
  assert _find({}, host=1, **flags).coordinator == '[fd00::1]:8476'


@pytest.mark.parametrize(
  ('flags', 'pattern'),
  [
    (dict(hosts=0), '--hosts=0; pass the number of hosts'),
    (dict(hosts=2), '2 hosts without --host; pass --host=I'),
    (dict(host=1), '--host=1 without --hosts; pass --hosts=N'),
    (dict(coordinator='a:1'), '--coordinator=a:1 without --hosts; pass'),
    (dict(hosts=2, host=2), '--host=2 is not among the 2 hosts.*correct'),
    (dict(hosts=2, host=-1), '--host=-1 is not among the 2 hosts.*correct'),
    (dict(hosts=2, host=0), 'without --coordinator; pass --coordinator=ADDR'),
    (dict(standby=True), '--standby without --hosts; pass --hosts=N'),
    (dict(standby=True, hosts=2), 'without --coordinator; pass --coord'),
    (dict(standby=True, hosts=2, host=1), '--host=1 and --standby exclude'),
    (
      dict(bind='0.0.0.0'),
      '--bind=0.0.0.0 is for runs on several hosts; leave',
    ),
    (dict(processes=0), '--processes=0; pass 1 or more'),
  ],
)
def test_incomplete_or_contradicting_flags(flags, pattern):
  _refuse(pattern, {}, **flags)


@pytest.mark.parametrize(
  ('endpoint', 'pattern'),
  [
    ('node001', 'node001 has no port'),
    ('[fd00::1]', r'\[fd00::1\] has no port'),
    ('fd00::1', 'fd00::1 is an IPv6 address without brackets or port'),
    ('fd00::1:8476', 'without brackets'),
    ('node001:0', 'a port outside of 1 to 65535'),
    ('node001:65536', 'a port outside of 1 to 65535'),
    ('node001:http', 'is no address with a port'),
    ('http://node001:80', 'is no address with a port'),
    ('[node001]:80', 'is no address with a port'),
    (':80', 'is no address with a port'),
    ('', 'has no port'),
    ('node001:80:', 'is no address with a port'),
  ],
)
def test_bad_endpoints(endpoint, pattern):
  pattern = f'--coordinator=.*{pattern}.*write ADDRESS:PORT'
  _refuse(pattern, {}, hosts=2, host=1, coordinator=endpoint)


@pytest.mark.parametrize('bind', ['::1', 'a:b', '[::]:0', 'a:99999', ''])
def test_bad_addresses_to_listen_at(bind):
  flags = dict(hosts=2, host=0, coordinator='10.1.0.1:80', bind=bind)
  _refuse(f'--bind={re.escape(bind)}.*write ADDRESS:PORT', {}, **flags)


def test_a_wildcard_is_no_coordinator():
  flags = dict(hosts=2, host=1, coordinator='0.0.0.0:80')
  _refuse('no address to reach host 0 at.*--bind=0.0.0.0:80', {}, **flags)


def test_split():
  assert placement.split('[fd00::1]:8476') == ('fd00::1', 8476)
  assert placement.split('node001.example.org:80') == (
    'node001.example.org',
    80,
  )


def test_typed_loopback_is_for_one_machine():
  for address in ('127.0.0.1', 'localhost', '[::1]'):
    coordinator = f'{address}:8476'
    found = _find({}, hosts=2, host=0, coordinator=coordinator)
    assert found.bind == coordinator


def test_a_typed_name_that_host_0_has_as_loopback():
  """As Debian's /etc/hosts does: the others would be refused."""
  debian = {'node001': ['127.0.1.1']}
  flags = dict(hosts=2, coordinator='node001:8476', names=debian)
  _refuse('node001 is 127.0.1.1.*pass --bind=', {}, host=0, **flags)
  bound = _find({}, host=0, bind='0.0.0.0', **flags)
  assert bound.bind == '0.0.0.0:8476'
  assert _find({}, host=1, **flags).coordinator == 'node001:8476'


@pytest.mark.parametrize('environment', [_SLURM, _SLURM_FIRST, _OPEN_MPI])
def test_a_derived_coordinator_is_reached_from_other_hosts(environment):
  debian = {'node001': ['127.0.1.1']}
  _refuse('node001 is 127.0.1.1.*pass --coord', environment, names=debian)
  _refuse('node001.*has no address.*pass --coord', environment, names={})
  typed = _find(environment, names=debian, coordinator='10.1.0.1:8476')
  assert typed.coordinator == '10.1.0.1:8476'
  both = _find(environment, names={'node001': ['127.0.1.1', '10.1.0.1']})
  assert both.coordinator.startswith('node001:')


def test_a_derived_coordinator_that_listens_elsewhere():
  debian = {'node001': ['127.0.1.1']}
  assert _find(_SLURM_FIRST, bind='0.0.0.0', names=debian).bind == (
    '0.0.0.0:61820'
  )
  _refuse('127.0.1.1', _SLURM, bind='0.0.0.0', names=debian)


@pytest.mark.parametrize('name', ['localhost', '127.0.0.1', '[::1]'])
def test_a_derived_coordinator_is_no_loopback_by_name(name):
  environment = {**_JOBSET, 'LAUNCH_COORDINATOR': f'{name}:8476'}
  _refuse('where no other host reaches it.*pass --coord', environment)


def test_launchers_on_one_machine_reach_its_loopback():
  one_node = {**_SLURM_FIRST, 'SLURM_STEP_TASKS_PER_NODE': '3'}
  found = _find(one_node, names={'node001': ['127.0.1.1']})
  assert found.bind == 'node001:61820'


def test_the_name_in_a_jobset_may_appear_later():
  assert _find(_JOBSET, names={}).coordinator.startswith('jaxllm-workers')
  bad = {**_JOBSET, 'LAUNCH_COORDINATOR': 'jaxllm-workers-0-0.jaxllm'}
  _refuse('LAUNCH_COORDINATOR=.* has no port', bad)


@pytest.mark.parametrize(
  'flags', [dict(hosts=1), dict(hosts=1, processes=1), dict(hosts=1, bind='a')]
)
def test_tasks_beyond_the_hosts_are_named(flags):
  _refuse('task 1 of Slurm is not among the 1 hosts.*--stand', _SLURM, **flags)


@pytest.mark.parametrize(
  ('environment', 'gpus', 'flags', 'devices'),
  [
    ({}, 8, {}, ()),
    ({}, 0, dict(processes=2), ()),
    ({}, 4, dict(processes=2), ('0,1', '2,3')),
    ({}, 8, dict(processes=8), tuple('01234567')),
    ({}, 8, dict(devices='2,3'), ('2,3',)),
    ({}, 0, dict(devices='3,2', processes=2), ('3', '2')),
    ({'CUDA_VISIBLE_DEVICES': '2,3'}, 8, {}, ()),
    ({'CUDA_VISIBLE_DEVICES': '2,3'}, 8, dict(processes=2), ('2', '3')),
    ({'CUDA_VISIBLE_DEVICES': '2,3'}, 8, dict(devices='5'), ('5',)),
    ({'CUDA_VISIBLE_DEVICES': ''}, 8, dict(processes=2), ()),
    ({'CUDA_VISIBLE_DEVICES': '-1'}, 8, dict(processes=2), ()),
    ({'CUDA_VISIBLE_DEVICES': 'NoDevFiles'}, 0, dict(processes=2), ()),
    (
      {'CUDA_VISIBLE_DEVICES': 'GPU-8a56-4b,MIG-GPU-1c2d/1/0'},
      2,
      dict(processes=2),
      ('GPU-8a56-4b', 'MIG-GPU-1c2d/1/0'),
    ),
    ({'JAX_PLATFORMS': 'cpu'}, 1, dict(processes=2), ()),
    ({'JAX_PLATFORMS': 'cuda,cpu'}, 2, dict(processes=2), ('0', '1')),
    # Local rank 1 of 2 launchers on a machine.
    (_OPEN_MPI, 4, {}, ('2,3',)),
    (_OPEN_MPI, 4, dict(processes=2), ('2', '3')),
    ({**_OPEN_MPI, 'CUDA_VISIBLE_DEVICES': '1'}, 4, {}, ()),
  ],
)
def test_gpus_are_shared_out_in_order(environment, gpus, flags, devices):
  assert _find(environment, gpus=gpus, **flags).devices == devices


@pytest.mark.parametrize(
  ('environment', 'gpus', 'flags', 'pattern'),
  [
    ({}, 3, dict(processes=2), 'this host has 3 GPUs.*--processes=2.*pass'),
    ({}, 2, dict(processes=4), 'this host has 2 GPUs.*--processes=4.*pass'),
    ({}, 0, dict(processes=2, devices='7'), '--devices=7 has 1 GPUs.*pass'),
    ({}, 8, dict(devices='2,2'), '--devices=2,2; pass different'),
    ({}, 8, dict(devices=''), '--devices=; pass different'),
    ({}, 8, dict(devices='all'), '--devices=all; pass different'),
    (
      {'CUDA_VISIBLE_DEVICES': '2,3,4'},
      8,
      dict(processes=2),
      'CUDA_VISIBLE_DEVICES=2,3,4 has 3 GPUs.*--processes=2.*pass',
    ),
    (_OPEN_MPI, 3, {}, '3 GPUs, which 2 launchers with --processes=1.*pass'),
  ],
)
def test_gpus_that_cannot_be_shared(environment, gpus, flags, pattern):
  _refuse(pattern, environment, gpus=gpus, **flags)


def test_gpus_of_this_host(tmp_path):
  for name in ('nvidia10', 'nvidia2', 'nvidiactl', 'nvidia-uvm', 'null'):
    (tmp_path / name).touch()
  assert placement.local_gpus(str(tmp_path)) == ['nvidia2', 'nvidia10']


def test_names_resolve():
  assert '127.0.0.1' in placement.resolve('localhost')
  with pytest.raises(socket.gaierror):
    placement.resolve('no-such-host.invalid')
