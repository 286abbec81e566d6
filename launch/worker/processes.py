"""This process among the processes of a run: joining, waiting, sharing rows.

Every process of a run executes the same programs in the same order; the first
one alone writes what users read. With one process all of this does nothing.
"""

from collections.abc import Iterator
import contextlib
import time
from typing import Any

import jax
from jax._src import distributed
import numpy as np

from launch.worker import agreement
from launch.worker import outcome

# How often a process that waits for the first one looks.
_POLL_S = 0.2


def join(
  process: int, processes: int, coordinator: str, bind: str, timeout_s: float
) -> None:
  """Meets the other processes; call it before anything asks for a device.

  A process that the others miss, or a coordinator that is not there, ends this
  process by SIGABRT after `timeout_s`, with jax's words in the log, which
  `launch.control.diagnosis` reads.

  Args:
    process: number of this one, from 0; the first serves the coordinator.
    processes: how many there are.
    coordinator: 'ADDRESS:PORT' of the first one.
    bind: 'ADDRESS:PORT' where the first one listens.
    timeout_s: how long to wait for the others.
  """
  if processes == 1:
    return
  # Else it swallows SIGTERM, which means: save and end.
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(
    coordinator_address=coordinator,
    num_processes=processes,
    process_id=process,
    coordinator_bind_address=bind,
    cluster_detection_method='deactivate',
    initialization_timeout=int(timeout_s),
    shutdown_timeout_seconds=int(timeout_s),
  )


def leave() -> None:
  """Waits until all processes are done, so that none misses the first one."""
  if jax.process_count() > 1:
    jax.distributed.shutdown()


def wait_for_all(name: str, timeout_s: float) -> None:
  """Returns when every process has come here.

  The first collective between two processes gives up after 30 s, so this stands
  where one of them may have compiled or read for longer than the others.

  Args:
    name: of the place; each may be passed once.
    timeout_s: how long to wait.

  Raises:
    jax.errors.JaxRuntimeError: a process did not come in time.
  """
  if jax.process_count() > 1:
    client = distributed.global_state.client
    client.wait_at_barrier(f'jaxllm/{name}', int(timeout_s * 1000))


@contextlib.contextmanager
def first_one_first(name: str, stop: Any) -> Iterator[None]:
  """Runs the body in the first process, and when that is done in the others.

  Args:
    name: of the place; each may be passed once.
    stop: becomes true when waiting should end at once.

  Raises:
    outcome.Preempted: a stop was requested meanwhile.
  """
  client, key = distributed.global_state.client, f'jaxllm/{name}'
  while not agreement.is_first() and not _is_set(client, key):
    if stop:
      raise outcome.Preempted(f'stopped while waiting for {name}')
    time.sleep(_POLL_S)
  yield
  if agreement.is_first() and jax.process_count() > 1:
    client.key_value_set(key, 'done')


def local_rows(place: jax.sharding.NamedSharding, batch_size: int) -> range:
  """Which rows of a batch this process reads.

  Processes that hold the same rows (where `tensor` spans processes) all read
  them.

  Example: with 4 devices of 2 processes along `data` and a batch of 8, the
  first process has range(0, 4), the second range(4, 8).

  Args:
    place: `sharding.batch_sharding` of the mesh.
    batch_size: rows of a batch over all processes, B.
  """
  indices = place.addressable_devices_indices_map((batch_size, 1)).values()
  bounds = [rows.indices(batch_size)[:2] for rows, _ in indices]
  return range(min(b for b, _ in bounds), max(e for _, e in bounds))


def global_batch(
  place: jax.sharding.NamedSharding, batch_size: int, local: Any
) -> Any:
  """Arrays over all processes from the rows that each has read.

  Args:
    place: `sharding.batch_sharding` of the mesh.
    batch_size: rows of a batch over all processes, B.
    local: tree of numpy arrays `[len(local_rows), ...]`.

  Returns:
    The tree with jax arrays `[B, ...]`.
  """
  return jax.tree.map(
    lambda rows: jax.make_array_from_process_local_data(
      place, rows, (batch_size, *rows.shape[1:])
    ),
    local,
  )


def on_devices(place: jax.sharding.NamedSharding, value: int) -> jax.Array:
  """This process's `value` on each of its devices: int32 `[devices]`.

  The `max` of it says what any process asks for.

  Args:
    place: `program.every_device` of the mesh.
    value: a flag.
  """
  mesh = place.mesh
  local = np.full(len(mesh.local_devices), value, np.int32)
  return jax.make_array_from_process_local_data(place, local, (mesh.size,))


def _is_set(client: Any, key: str) -> bool:
  try:
    client.key_value_try_get(key)
  except jax.errors.JaxRuntimeError as error:
    if 'NOT_FOUND' in str(error):
      return False
    raise
  return True
