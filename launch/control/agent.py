"""Starts, watches and stops the workers of this host."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import errno

from launch.control import protocol
from launch.control import worker_process


@dataclasses.dataclass(frozen=True)
class Assignment:
  """What the workers of one attempt are among all processes of the run.

  Attributes:
    attempt: its number.
    first_process: number of this host's first worker.
    processes: of the whole run.
    coordinator: 'ADDRESS:PORT' where they meet; '' for a single one.
    bind: 'ADDRESS:PORT' where the first one listens.
  """

  attempt: int
  first_process: int
  processes: int
  coordinator: str
  bind: str


class Agent:
  """The workers of one attempt at a time; call its methods from one thread."""

  def __init__(
    self,
    *,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    log_path: Callable[[int], str],
    lock_fd: int,
    on_worker_pids: Callable[[list[int]], None],
    deliver: Callable[[protocol.Event], None],
  ):
    """Says what to start; starts nothing.

    Args:
      command: the worker's; flags that name it among the processes of the run
        and ` --events_fd=N` are appended.
      environments: one per worker, added to this process's.
      log_path: from the number of a process to the file that receives its
        stdout and stderr.
      lock_fd: a locked file that the workers keep open.
      on_worker_pids: called with the process ids of new workers.
      deliver: receives the workers' events, each worker's in order, in other
        threads; it may block, which in time blocks the workers' `send`.
    """
    self._command = tuple(command)
    self._environments = [dict(each) for each in environments]
    self._log_path = log_path
    self._lock_fd = lock_fd
    self._on_worker_pids = on_worker_pids
    self._deliver = deliver
    self._workers: list[worker_process.WorkerProcess] = []

  @property
  def num_workers(self) -> int:
    """How many workers an attempt has on this host."""
    return len(self._environments)

  def start(self, assignment: Assignment) -> tuple[protocol.Event, ...]:
    """Starts the workers.

    Returns:
      What happened at once, worker by worker: WORKER_STARTED, and if the system
      could not start it, ERROR and WORKER_EXITED.
    """
    for worker in self._workers:
      # Its WORKER_EXITED was its thread's last act, so this does not wait.
      worker.join()
    self._workers = []
    events = []
    for index, environment in enumerate(self._environments):
      events += self._start_one(assignment, index, environment)
    self._on_worker_pids([worker.pid for worker in self._workers])
    return tuple(events)

  def terminate(self) -> None:
    """Asks the workers to save and end, once; they may take their time."""
    for worker in self._workers:
      worker.terminate()

  def kill(self) -> None:
    """Kills the workers and their children now."""
    for worker in self._workers:
      worker.kill()

  def is_running(self) -> bool:
    """Whether a worker lives."""
    return any(worker.is_running() for worker in self._workers)

  def close(self) -> None:
    """Leaves no process behind: kills workers that still run.

    `deliver` must not block for ever any more.
    """
    self.kill()
    for worker in self._workers:
      worker.join()

  def _start_one(
    self, assignment: Assignment, index: int, environment: Mapping[str, str]
  ) -> list[protocol.Event]:
    process = assignment.first_process + index
    flags = (
      f'--process={process}',
      f'--processes={assignment.processes}',
      f'--coordinator={assignment.coordinator}',
      f'--bind={assignment.bind}',
    )
    try:
      worker = worker_process.WorkerProcess(
        attempt=assignment.attempt,
        process=process,
        command=(*self._command, *flags),
        environment=environment,
        log_path=self._log_path(process),
        lock_fd=self._lock_fd,
        deliver=self._deliver,
      )
    except OSError as error:
      return _failed_start(assignment, process, error)
    self._workers.append(worker)
    return [_started(assignment, process, worker.pid)]


def _started(
  assignment: Assignment, process: int, pid: int | None
) -> protocol.Event:
  return worker_process.agent_event(
    protocol.EventKind.WORKER_STARTED,
    attempt=assignment.attempt,
    process=process,
    processes=assignment.processes,
    pid=pid,
  )


def _failed_start(
  assignment: Assignment, process: int, error: OSError
) -> list[protocol.Event]:
  full = error.errno in (errno.ENOSPC, errno.EDQUOT)
  exit_code = protocol.ExitCode.DISK_FULL if full else protocol.ExitCode.CRASHED
  return [
    _started(assignment, process, None),
    worker_process.agent_event(
      protocol.EventKind.ERROR,
      process=process,
      text=f'cannot start the worker: {error}',
      exit_code=exit_code,
      traceback='',
    ),
    worker_process.worker_exited(assignment.attempt, process, exit_code, ''),
  ]
