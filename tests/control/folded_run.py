"""A run as the policy sees it, event by event, with a clock of its own."""

from launch.control import cluster
from launch.control import policy
from launch.control import protocol

Kind = protocol.EventKind

LIMITS = cluster.Limits(
  max_restarts=5,
  max_restarts_without_progress=3,
  backoff_s=2.0,
  join_timeout_s=100.0,
  stuck_timeout_s=1000.0,
)


class Run:
  """Folds events as a controller would, with a clock of its own."""

  def __init__(self, limits=LIMITS, processes=1, hosts=1):
    self.processes = processes
    self.cluster = cluster.Cluster(
      limits=limits, workdir='runs/x', num_hosts=hosts
    )
    self.now = 1000.0
    self.begin()

  def begin(self):
    self.tell(Kind.RUN_STARTED)
    self.join('host 0')

  def join(self, place):
    self.tell(
      Kind.HOST_JOINED, place=place, processes=self.processes, where='here'
    )

  def tell(self, kind, step=None, **data):
    event = protocol.Event(kind, 'worker', self.now, step, data)
    self.cluster = cluster.fold(self.cluster, event)

  def decide(self):
    return policy.decide(self.cluster, self.now)

  def start(self):
    (action,) = self.decide()
    assert isinstance(action, policy.StartWorkers)
    self.tell(
      Kind.DECISION,
      action='start_workers',
      text='',
      attempt=action.attempt,
      hosts=[list(each) for each in action.hosts],
    )
    (action,) = self.decide()
    assert isinstance(action, policy.Wait)
    assert action.until_s == self.now + LIMITS.stuck_timeout_s

  def say(self, text, exit_code, process=0):
    self.tell(
      Kind.ERROR,
      process=process,
      text=text,
      exit_code=exit_code,
      traceback='',
    )

  def reach(self, step):
    self.tell(Kind.PROGRESS, step=step, done=step)

  def exit(self, exit_code, log_tail='', process=0):
    attempt = self.cluster.attempts[-1].number
    self.tell(
      Kind.WORKER_EXITED,
      attempt=attempt,
      process=process,
      exit_code=exit_code,
      log_tail=log_tail,
    )

  def wait(self):
    (action,) = self.decide()
    assert isinstance(action, policy.Wait)
    self.now = action.until_s

  def ask_to_stop(self):
    self.tell(Kind.DECISION, action='stop', text='SIGTERM')
