"""jobset.yaml: the fields that Kubernetes knows, and the rules we rely on."""

import copy
import json
import pathlib
import re

import pytest
import yaml

from launch.control import placement
from launch.control import protocol

_ROOT = pathlib.Path(__file__).parents[2]
_FILE = _ROOT / 'launch' / 'cluster' / 'jobset.yaml'
_SCHEMA = _ROOT / 'tests' / 'testdata' / 'jobset_schema.json'

_SCALARS = {
  'string': str,
  'boolean': bool,
  'integer': int,
  'number': (int, float),
  'integer_or_string': (int, str),
  'quantity': (int, float, str),
}
_QUANTITY = r'\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?'
_COORDINATOR = 'jaxllm-workers-0-0.jaxllm'


@pytest.fixture(scope='module')
def objects():
  return json.loads(_SCHEMA.read_text())['objects']


@pytest.fixture
def jobset():
  return yaml.safe_load(_FILE.read_text())


def _faults(objects, kind, value, path=''):
  """What an API server would refuse, one line per fault."""
  match kind:
    case [item]:
      if not isinstance(value, list):
        return [f'{path} is no list']
      parts = [(item, each, f'{path}[{i}]') for i, each in enumerate(value)]
    case {'enum': choices}:
      return [] if value in choices else [f'{path} is none of {choices}']
    case {'': item}:
      if not isinstance(value, dict):
        return [f'{path} is no map']
      parts = [(item, each, f'{path}.{key}') for key, each in value.items()]
    case 'any':
      return []
    case str() if kind in _SCALARS:
      right = isinstance(value, _SCALARS[kind]) and (
        not isinstance(value, bool) or kind == 'boolean'
      )
      if kind == 'quantity':
        right = right and re.fullmatch(_QUANTITY, str(value))
      return [] if right else [f'{path} is no {kind}: {value!r}']
    case _:
      if not isinstance(value, dict):
        return [f'{path} is no {kind}']
      fields, required = objects[kind]['fields'], objects[kind]['required']
      faults = [
        f'{path}.{key} is unknown' for key in value if key not in fields
      ]
      faults += [
        f'{path}.{key} is missing' for key in required if key not in value
      ]
      parts = [
        (fields[key], each, f'{path}.{key}')
        for key, each in value.items()
        if key in fields
      ]
      return faults + _of_parts(objects, parts)
  return _of_parts(objects, parts)


def _of_parts(objects, parts):
  return [fault for part in parts for fault in _faults(objects, *part)]


def _job(jobset, name):
  jobs = {each['name']: each for each in jobset['spec']['replicatedJobs']}
  return jobs[name]['template']['spec']


def _pod(jobset, name):
  return _job(jobset, name)['template']['spec']


def _environment(pod):
  """The container's variables, as the kubelet resolves them."""
  variables = {}
  for entry in pod['containers'][0]['env']:
    value = entry.get('value')
    if value is None:
      path = entry['valueFrom']['fieldRef']['fieldPath']
      assert path == "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
      value = _COORDINATOR
    for name, earlier in variables.items():
      value = value.replace(f'$({name})', earlier)
    variables[entry['name']] = value
  return variables


def test_kubernetes_knows_every_field(objects, jobset):
  assert _faults(objects, 'JobSet', jobset) == []


@pytest.mark.parametrize(
  ('change', 'fault'),
  [
    (lambda s: s.update(network={'dns': True}), '.spec.network.dns is unknown'),
    (
      lambda s: s['replicatedJobs'][0]['template']['spec'].update(parallel=2),
      '.spec.replicatedJobs[0].template.spec.parallel is unknown',
    ),
    (
      lambda s: s['replicatedJobs'][0].pop('name'),
      '.spec.replicatedJobs[0].name is missing',
    ),
    (
      lambda s: s['failurePolicy'].update(maxRestarts='0'),
      ".spec.failurePolicy.maxRestarts is no integer: '0'",
    ),
    (
      lambda s: s['successPolicy'].update(operator='Every'),
      ".spec.successPolicy.operator is none of ['All', 'Any']",
    ),
    (
      lambda s: s['successPolicy'].update(targetReplicatedJobs='workers'),
      '.spec.successPolicy.targetReplicatedJobs is no list',
    ),
  ],
)
def test_the_check_finds_faults(objects, jobset, change, fault):
  change(jobset['spec'])
  assert _faults(objects, 'JobSet', jobset) == [fault]


@pytest.mark.parametrize(
  ('field', 'value', 'fault'),
  [
    ('env', [{'name': 'A', 'value': 2}], 'env[0].value is no string: 2'),
    ('env', [{'value': '2'}], 'env[0].name is missing'),
    ('gpu', 8, 'gpu is unknown'),
    ('resources', {'limits': {'cpu': 'all'}}, 'cpu is no quantity'),
    ('workingDir', True, 'workingDir is no string'),
  ],
)
def test_the_check_finds_faults_in_containers(
  objects, jobset, field, value, fault
):
  jobset = copy.deepcopy(jobset)  # aliases of YAML are one object
  _pod(jobset, 'workers')['containers'][0][field] = value
  (found,) = _faults(objects, 'JobSet', jobset)
  assert fault in found


def test_the_hosts_are_counted_once(jobset):
  job = _job(jobset, 'workers')
  for each in (job, _job(jobset, 'standbys')):
    assert each['completionMode'] == 'Indexed'
    assert each['parallelism'] == each['completions']
  variables = _environment(_pod(jobset, 'workers'))
  assert variables['LAUNCH_HOSTS'] == str(job['completions'])


def test_launchers_find_their_place(jobset):
  hosts = _job(jobset, 'workers')['completions']

  def find(name, index):
    flags = dict(
      arg.removeprefix('--').partition('=')[::2]
      for arg in _pod(jobset, name)['containers'][0]['args']
    )
    given = placement.Given(
      hosts=None,
      host=None,
      standby='standby' in flags,
      coordinator=None,
      bind=flags.get('bind'),
      processes=None,
      devices=None,
    )
    variables = _environment(_pod(jobset, name)) | index
    return placement.find(given, variables, [], lambda name: [])

  for number in range(hosts):
    found = find('workers', {'JOB_COMPLETION_INDEX': str(number)})
    assert (found.hosts, found.host) == (hosts, number)
    assert found.coordinator == f'{_COORDINATOR}:8476'
    assert found.bind == ('' if number else '0.0.0.0:8476')
  standby = find('standbys', {'JOB_COMPLETION_INDEX': '0'})
  assert (standby.hosts, standby.host) == (hosts, None)
  assert standby.coordinator == f'{_COORDINATOR}:8476'


def test_the_coordinator_is_host_0(jobset):
  spec = jobset['spec']
  assert spec['coordinator'] == {
    'replicatedJob': 'workers',
    'jobIndex': 0,
    'podIndex': 0,
  }
  assert spec['network']['enableDNSHostnames']
  assert spec['network']['publishNotReadyAddresses']
  assert jobset['metadata']['name'] == 'jaxllm'


def test_recovery_is_ours(jobset):
  assert jobset['spec']['failurePolicy']['maxRestarts'] == 0
  for name in ('workers', 'standbys'):
    assert _job(jobset, name)['backoffLimit'] >= 100
    # What podFailurePolicy wants, too.
    assert _pod(jobset, name)['restartPolicy'] == 'Never'
  exit_codes, disruption = _job(jobset, 'workers')['podFailurePolicy']['rules']
  assert disruption == {
    'action': 'Ignore',
    'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}],
  }
  assert exit_codes['action'] == 'FailJob'
  ends = exit_codes['onExitCodes']
  assert ends['operator'] == 'In'
  pod = _pod(jobset, 'workers')
  assert ends['containerName'] == pod['containers'][0]['name']
  code = protocol.ExitCode
  assert ends['values'] == [
    code.USER_ERROR,
    code.NOT_FINITE,
    code.OUT_OF_MEMORY,
    code.DISK_FULL,
    code.NO_PROGRESS,
    code.RETRIES_EXHAUSTED,
  ]


def test_the_end_of_host_0_is_the_end(jobset):
  """The pod of a lost node may never end: its work is a standby's."""
  rules = _job(jobset, 'workers')['successPolicy']['rules']
  assert rules == [{'succeededIndexes': '0'}]
  assert jobset['spec']['successPolicy'] == {
    'operator': 'All',
    'targetReplicatedJobs': ['workers'],
  }


def test_pods_have_the_time_to_save(jobset):
  configs = (_ROOT / 'configs').glob('*.py')
  found = re.findall(
    r'grace_s=([\d.]+)', ''.join(c.read_text() for c in configs)
  )
  assert found
  for name in ('workers', 'standbys'):
    grace_s = _pod(jobset, name)['terminationGracePeriodSeconds']
    assert grace_s >= max(map(float, found)) + 15


def test_pods_share_files_and_have_memory_for_them(jobset):
  for name in ('workers', 'standbys'):
    pod = _pod(jobset, name)
    volumes = {each['name']: each for each in pod['volumes']}
    (container,) = pod['containers']
    mounts = {
      mount['mountPath']: volumes[mount['name']]
      for mount in container['volumeMounts']
    }
    assert mounts['/dev/shm']['emptyDir']['medium'] == 'Memory'
    assert mounts['/dev/shm']['emptyDir']['sizeLimit'].endswith('Gi')
    flags = [arg for arg in container['args'] if arg.startswith('--workdir=')]
    (workdir,) = [pathlib.PurePath(arg.partition('=')[2]) for arg in flags]
    (shared,) = [
      volume for path, volume in mounts.items() if workdir.is_relative_to(path)
    ]
    assert shared['persistentVolumeClaim']['claimName']
    assert container['resources']['limits']['nvidia.com/gpu']


def test_workers_and_standbys_run_the_same(jobset):
  first, second = (
    _pod(jobset, name)['containers'][0] for name in ('workers', 'standbys')
  )
  assert first['args'][:2] == second['args'][:2]
  kept = ('image', 'command', 'workingDir', 'env', 'resources')
  assert [first[key] for key in kept] == [second[key] for key in kept]
  assert (_ROOT / first['args'][0].partition('=')[2]).exists()
