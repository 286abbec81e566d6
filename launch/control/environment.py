"""The environment of a worker: every flag of XLA and NCCL that we set, and why.

What the user's environment sets wins: XLA reads the last of two equal flags,
and a variable that is there is left alone.
"""

from collections.abc import Mapping

# Sums of gradients travel in messages of this size: fewer, longer ones.
_COMBINED_BYTES = 1 << 27


def of_worker(
  environment: Mapping[str, str],
  *,
  num_cores: int,
  gpus: str | None,
  collective_timeout_s: float,
  deterministic: bool,
) -> dict[str, str]:
  """What to add to the launcher's environment.

  Args:
    environment: the launcher's.
    num_cores: CPU threads of one worker; the bits of its sums depend on it.
    gpus: the GPUs that it may see, as CUDA_VISIBLE_DEVICES writes them; None
      leaves that to the launcher's environment.
    collective_timeout_s: after which a collective that waits for a process
      gives up, so that a run with a hung process ends.
    deterministic: whether GPU kernels whose bits differ from run to run are
      left out, which costs speed; CPU kernels are deterministic anyway.
  """
  seconds = max(1, round(collective_timeout_s))
  flags = [
    # Between processes (gloo); the default waits for minutes or for ever.
    f'--xla_cpu_collective_timeout_seconds={seconds}',
    # Between devices of one process; the default of 40 s is short where eight
    # of them share two cores.
    f'--xla_cpu_collective_call_terminate_timeout_seconds={seconds}',
    # The default, -1, lets a stuck NCCL call wait for ever.
    f'--xla_gpu_nccl_termination_timeout_seconds={seconds}',
    # Computes while gradients and weights travel.
    '--xla_gpu_enable_latency_hiding_scheduler=true',
    f'--xla_gpu_all_reduce_combine_threshold_bytes={_COMBINED_BYTES}',
    f'--xla_gpu_all_gather_combine_threshold_bytes={_COMBINED_BYTES}',
    f'--xla_gpu_reduce_scatter_combine_threshold_bytes={_COMBINED_BYTES}',
  ]
  if deterministic:
    # Which kernel is the fastest is measured once and kept beside the compiled
    # programs (jax_persistent_cache_enable_xla_caches), so a restart picks it
    # again.
    flags.append('--xla_gpu_exclude_nondeterministic_ops=true')
  added = {
    'NPROC': str(num_cores),
    'PYTHONUNBUFFERED': '1',
    'XLA_FLAGS': ' '.join([*flags, environment.get('XLA_FLAGS', '')]).strip(),
  }
  if gpus is not None:
    added['CUDA_VISIBLE_DEVICES'] = gpus
  defaults = {
    # Says why a communicator failed.
    'NCCL_DEBUG': 'WARN',
    # jax's own 0.75 leaves a quarter of the memory unused.
    'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92',
  }
  return added | {
    name: value for name, value in defaults.items() if name not in environment
  }
