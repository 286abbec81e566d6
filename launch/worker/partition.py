"""Compiles a program and keeps the text of its partition among devices."""

import pathlib
import tempfile

import jax

_PASS = 'spmd-partitioning'


def compile_and_read(
  lowered: jax.stages.Lowered, num_devices: int
) -> tuple[jax.stages.Compiled, str]:
  """Compiles, and returns the HLO text as the partitioner left it.

  The partitioner is the same for every backend; the CPU's later passes turn
  bfloat16 into float32, in the compiled program's own text. XLA gives the
  earlier one out through files only. Code is generated without optimizations:
  it is not going to run.

  Args:
    lowered: the program.
    num_devices: that it is for. One device has nothing to partition: the text
      is the program's as it was lowered.

  Raises:
    ValueError: the program came from the persistent compilation cache.
  """
  name = '*.before_optimizations.txt'
  if num_devices > 1:
    name = f'*.after_{_PASS}.*.txt'
  with tempfile.TemporaryDirectory(prefix='jaxllm-plan-') as directory:
    compiled = lowered.compile(
      compiler_options={
        'xla_dump_to': directory,
        'xla_dump_hlo_pass_re': _PASS,
        'xla_backend_optimization_level': 0,
      }
    )
    found = list(pathlib.Path(directory).glob(name))
    if len(found) != 1:
      raise ValueError(
        f'the compiler wrote {len(found)} texts of the partitioned program:'
        ' switch the compilation cache off (JAX_ENABLE_COMPILATION_CACHE=false)'
      )
    return compiled, found[0].read_text(encoding='utf-8')
