"""Compiles without the suite's cache, out of which no text would come."""

from collections.abc import Iterator
import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
  """Programs inside are compiled, whether or not they are in the cache."""
  compilation_cache.reset_cache()
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', True)
    compilation_cache.reset_cache()
