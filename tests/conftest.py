"""Sets JAX up for every test: CPU, 8 devices, strict promotion, one cache."""

import os
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('NPROC', '2')
# The suite compiles far more than it computes: leave out LLVM's optimizations.
# Eight devices share two cores: one that has not had its turn in 40 s, the
# default, is slow and not stuck.
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_backend_optimization_level=0',
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
  ]
)

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update(
  'jax_compilation_cache_dir',
  os.path.join(tempfile.gettempdir(), f'jaxllm-test-cache-{os.getuid()}'),
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
