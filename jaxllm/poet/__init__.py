"""POET as an optax transform; needs jax and optax only."""

from jaxllm.poet.blocks import MatrixDimensions
from jaxllm.poet.cayley import cayley
from jaxllm.poet.cayley import cayley_neumann
from jaxllm.poet.state import PoetState
from jaxllm.poet.state import Rotation
from jaxllm.poet.transform import effective_weights
from jaxllm.poet.transform import poet

__all__ = [
  'MatrixDimensions',
  'PoetState',
  'Rotation',
  'cayley',
  'cayley_neumann',
  'effective_weights',
  'poet',
]
