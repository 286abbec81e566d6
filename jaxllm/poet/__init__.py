"""POET as an optax transform; needs jax and optax only."""

from jaxllm.poet.blocks import MatrixDimensions
from jaxllm.poet.cayley import cayley
from jaxllm.poet.cayley import cayley_neumann
from jaxllm.poet.inner import alternate_sides
from jaxllm.poet.inner import clip_by_ramped_norm
from jaxllm.poet.inner import orthogonalize
from jaxllm.poet.inner import scale_by_angle
from jaxllm.poet.recipes import poet_bs
from jaxllm.poet.recipes import poet_fs
from jaxllm.poet.recipes import poet_x
from jaxllm.poet.state import PoetState
from jaxllm.poet.state import Rotation
from jaxllm.poet.transform import effective_weights
from jaxllm.poet.transform import poet

__all__ = [
  'MatrixDimensions',
  'PoetState',
  'Rotation',
  'alternate_sides',
  'cayley',
  'cayley_neumann',
  'clip_by_ramped_norm',
  'effective_weights',
  'orthogonalize',
  'poet',
  'poet_bs',
  'poet_fs',
  'poet_x',
  'scale_by_angle',
]
