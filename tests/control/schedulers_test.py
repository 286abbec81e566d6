"""What schedulers say of a task: read from environments that they made."""

import pytest

from launch.control import schedulers

# Slurm 22.05, `srun --nodes=2 --ntasks=3`, task 1.
SLURM = {
  'SLURM_JOB_ID': '70012',
  'SLURM_JOB_NODELIST': 'node[001-002]',
  'SLURM_LAUNCH_NODE_IPADDR': '10.1.0.1',
  'SLURM_LOCALID': '1',
  'SLURM_NODEID': '0',
  'SLURM_NTASKS': '3',
  'SLURM_PROCID': '1',
  'SLURM_STEP_ID': '0',
  'SLURM_STEP_NODELIST': 'node[001-002]',
  'SLURM_STEP_NUM_NODES': '2',
  'SLURM_STEP_NUM_TASKS': '3',
  'SLURM_STEP_TASKS_PER_NODE': '2,1',
  'SLURMD_NODENAME': 'node001',
}

# The batch script of a job of two tasks, without srun.
SLURM_BATCH = {
  'SLURM_JOB_ID': '70012',
  'SLURM_JOB_NODELIST': 'node[001-002]',
  'SLURM_LOCALID': '0',
  'SLURM_NODEID': '0',
  'SLURM_NODELIST': 'node[001-002]',
  'SLURM_NTASKS': '2',
  'SLURM_PROCID': '0',
  'SLURM_TASKS_PER_NODE': '1(x2)',
  'SLURMD_NODENAME': 'node001',
}

# Open MPI 4.1.4, `mpirun -np 2 --map-by node` in a Slurm job, rank 1.
OPEN_MPI_4 = {
  'OMPI_COMM_WORLD_LOCAL_RANK': '0',
  'OMPI_COMM_WORLD_LOCAL_SIZE': '1',
  'OMPI_COMM_WORLD_RANK': '1',
  'OMPI_COMM_WORLD_SIZE': '2',
  'OMPI_MCA_orte_hnp_uri': (
    '2017918976.0;tcp://192.0.2.2,172.17.0.1:34833;tcp6://[fd00::2]:41939'
  ),
  'OMPI_MCA_orte_local_daemon_uri': (
    '2017918976.1;tcp://192.0.2.3,172.17.0.1:35937;tcp6://[fd00::3]:38043'
  ),
  'PMIX_NAMESPACE': '2017918977',
  'PMIX_RANK': '1',
  'PMIX_SERVER_URI2': '2017918976.1;tcp4://127.0.0.1:55985',
  'SLURM_JOB_ID': '70013',
  'SLURM_LOCALID': '0',
  'SLURM_NODEID': '0',
  'SLURM_PROCID': '0',
  'SLURM_STEP_ID': '0',
  'SLURM_STEP_NODELIST': 'node002',
  'SLURM_STEP_NUM_NODES': '1',
  'SLURM_STEP_NUM_TASKS': '1',
  'SLURM_STEP_TASKS_PER_NODE': '1',
  'SLURMD_NODENAME': 'node002',
}

# Open MPI 5.0.11, rank 1 of 2 on another machine than mpirun.
OPEN_MPI_5 = {
  'OMPI_COMM_WORLD_LOCAL_RANK': '0',
  'OMPI_COMM_WORLD_LOCAL_SIZE': '1',
  'OMPI_COMM_WORLD_RANK': '1',
  'OMPI_COMM_WORLD_SIZE': '2',
  'OMPI_VERSION': '5.0.11',
  'PMIX_HOSTNAME': 'gpu-node-2',
  'PMIX_NAMESPACE': 'prterun-gpu-node-1-2715@1',
  'PMIX_RANK': '1',
  'PMIX_SERVER_URI2': 'prterun-gpu-node-1-2715@0.1;tcp4://127.0.0.1:39385',
  'PRTE_LAUNCHED': '1',
}

JOBSET = {
  'JOB_COMPLETION_INDEX': '1',
  'KUBERNETES_SERVICE_HOST': '10.96.0.1',
  'LAUNCH_COORDINATOR': 'jaxllm-workers-0-0.jaxllm:8476',
  'LAUNCH_HOSTS': '2',
}


def _find(environment, **changes):
  return schedulers.find_task({**environment, **changes})


def _refuse(text, environment, **changes):
  with pytest.raises(ValueError, match=text) as caught:
    _find(environment, **changes).coordinator()
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('environment', 'name', 'place', 'local', 'coordinator'),
  [
    (SLURM, 'Slurm', (3, 1), (2, 1), 'node001:61820'),
    (OPEN_MPI_4, 'Open MPI', (2, 1), (1, 0), '192.0.2.2:65191'),
    (OPEN_MPI_5, 'Open MPI', (2, 1), (1, 0), 'gpu-node-1:62590'),
    (JOBSET, 'JobSet', (2, 1), (1, 0), 'jaxllm-workers-0-0.jaxllm:8476'),
  ],
)
def test_recorded_environments(environment, name, place, local, coordinator):
  task = _find(environment)
  assert task.scheduler == name
  assert (task.hosts, task.host) == place
  assert (task.local_hosts, task.local_host) == local
  assert task.coordinator() == coordinator


@pytest.mark.parametrize(
  'environment',
  [
    {},
    {'HOME': '/root', 'KUBERNETES_SERVICE_HOST': '10.96.0.1'},
    {'JOB_COMPLETION_INDEX': '3'},
    {'PMIX_RANK': '1', 'PMIX_NAMESPACE': 'slurm.pmix.7.0'},
    SLURM_BATCH,
  ],
)
def test_nothing_that_counts_launchers_is_no_scheduler(environment):
  assert _find(environment) is None


def test_standbys_of_a_jobset_are_not_among_its_hosts():
  assert _find(JOBSET).standbys_apart
  assert not _find(SLURM).standbys_apart


@pytest.mark.parametrize(
  ('tasks', 'node', 'count'),
  [('1(x2)', '1', 1), ('4(x3),2', '2', 4), ('4(x3),2', '3', 2), ('8', '0', 8)],
)
def test_tasks_of_a_node(tasks, node, count):
  changes = dict(SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NODEID=node)
  assert _find(SLURM, **changes).local_hosts == count


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('SLURM_STEP_TASKS_PER_NODE', ''),
    ('SLURM_STEP_TASKS_PER_NODE', 'many'),
    ('SLURM_NODEID', '2'),
    ('SLURM_NODEID', '-1'),
    ('SLURM_PROCID', 'first'),
  ],
)
def test_a_value_that_slurm_would_not_write_is_named(name, value):
  with pytest.raises(ValueError, match=f'{name} is {value!r}'):
    _find(SLURM, **{name: value})


def test_slurm_ports_of_neighbouring_jobs_differ():
  ports = {
    _find(SLURM, SLURM_JOB_ID=str(job)).coordinator() for job in range(5000)
  }
  assert len(ports) == 4096


def test_slurm_says_when_task_0_is_not_on_the_first_node():
  changes = dict(SLURM_PROCID='0', SLURMD_NODENAME='node002')
  _refuse('runs on node002.*pass --coordinator', SLURM, **changes)


@pytest.mark.parametrize(
  'nodes', ['', 'node[1-', 'node]1[', 'a,,b', 'n[1-2-3]', 'n[]', 'a b', 'n[x]']
)
def test_a_bad_host_list_is_named(nodes):
  _refuse('SLURM_STEP_NODELIST: .*--coord', SLURM, SLURM_STEP_NODELIST=nodes)


# Checked against `scontrol show hostnames` where Slurm knows the form.
@pytest.mark.parametrize(
  ('short', 'names'),
  [
    ('node001', 'node001'),
    ('node001,host2', 'node001 host2'),
    (
      'node[001-004,007],gpu3',
      'node001 node002 node003 node004 node007 gpu3',
    ),
    ('a[1-2]b[3-4]', 'a1b3 a1b4 a2b3 a2b4'),
    ('n[08-10,3],gpu1', 'n08 n09 n10 n3 gpu1'),
    ('n[9-11]', 'n9 n10 n11'),
    ('rack[1-2]-ib,x.example.org', 'rack1-ib rack2-ib x.example.org'),
  ],
)
def test_host_lists(short, names):
  assert schedulers.expand(short) == names.split()


@pytest.mark.parametrize(
  ('uri', 'address'),
  [
    ('1531576320.0;tcp://10.96.0.1,10.148.0.1:34911', '10.96.0.1'),
    ('7.0;tcp://127.0.0.1,10.148.0.1:34911', '10.148.0.1'),
    ('7.0;usock;tcp://192.168.0.103:56672', '192.168.0.103'),
    ('7.0;tcp://172.20.102.82:33559;tcp://172.40.1.2:33559', '172.20.102.82'),
    (
      '7.0;tcp6://[fe80::b9b:ac5d,2620:10d:c083::2]:43370',
      '[2620:10d:c083::2]',
    ),
    ('7.0;tcp6://[fd00::2]:47609', '[fd00::2]'),
  ],
)
def test_uris_of_open_mpi_4(uri, address):
  coordinator = _find(OPEN_MPI_4, OMPI_MCA_orte_hnp_uri=uri).coordinator()
  assert coordinator == f'{address}:65191'


def test_every_rank_of_open_mpi_derives_the_same():
  first = _find(
    OPEN_MPI_5,
    OMPI_COMM_WORLD_RANK='0',
    PMIX_SERVER_URI2='prterun-gpu-node-1-2715@0.0;tcp4://127.0.0.1:41001',
  )
  assert first.coordinator() == _find(OPEN_MPI_5).coordinator()


@pytest.mark.parametrize('environment', [OPEN_MPI_4, OPEN_MPI_5])
def test_mpirun_on_a_login_node_is_not_taken_for_host_0(environment):
  text = 'mpirun was not called on host 0.*pass --coordinator'
  _refuse(text, environment, OMPI_COMM_WORLD_RANK='0')


def test_open_mpi_that_does_not_say_where_it_is():
  environment = {
    name: value
    for name, value in OPEN_MPI_5.items()
    if not name.startswith('PMIX')
  }
  _refuse('does not say where.*pass --coordinator', environment)
