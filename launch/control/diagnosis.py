"""From what a worker left behind to the cause of its end.

jax ends a process that loses its peers by SIGABRT, with the reason in the log
only; its texts are known by substrings, for paths and line numbers in them
change with every version.
"""

from launch.control import protocol

# What jax's coordination service says, and what it means; first match wins.
_COORDINATION = (
  (
    ('different incarnation',),
    protocol.ExitCode.USER_ERROR,
    'two processes have the same number: give each launcher its own --host',
  ),
  (
    ('RegisterTask', 'DEADLINE_EXCEEDED'),
    protocol.ExitCode.PEER_LOST,
    'the processes of the run did not meet in time: the first one does not'
    ' answer, or one is missing (launch.join_timeout_s)',
  ),
  (
    ('No address added out of total',),
    protocol.ExitCode.CRASHED,
    'the port where the processes meet is taken; another is tried',
  ),
  (
    ('JAX distributed service detected fatal errors',),
    protocol.ExitCode.PEER_LOST,
    'another process of the run died or stopped answering',
  ),
)


def explain(exit_code: int, error: str, log_tail: str) -> tuple[int, str]:
  """The exit code that says why a worker ended, and its one line.

  Args:
    exit_code: as a shell reports it.
    error: its own last words, '' if it had none.
    log_tail: the last lines of its log, '' if it had last words.

  Returns:
    The exit code, or another that names the cause better, and a line; '' where
    nothing is known.
  """
  if not error and exit_code > 128:
    for signs, better, line in _COORDINATION:
      if all(sign in log_tail for sign in signs):
        return better, line
  return exit_code, error or log_tail.split('\n')[-1]
