"""Every exported transform, on targets that rotations can reach."""

from collections.abc import Callable
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from jaxllm import poet
from jaxllm.poet import recipes

_STEPS = 300
_SHAPES = {'a': (2, 4, 8), 'b': (8, 4)}
_DECAY = functools.partial(optax.cosine_decay_schedule, decay_steps=_STEPS)


def _orthogonalized(*parts) -> optax.GradientTransformation:
  return optax.chain(
    optax.trace(0.9, nesterov=True),
    poet.orthogonalize(),
    *parts,
    poet.scale_by_angle(_DECAY(0.1)),
  )


def _ramped() -> optax.GradientTransformation:
  return optax.chain(
    poet.clip_by_ramped_norm(1.0, ramp_steps=5),
    optax.adam(_DECAY(1.5e-2), eps=1e-6),
  )


def _published(recipe: recipes.Recipe, **changes):
  """The recipe at this test's size and speed."""
  small = dataclasses.replace(
    recipe,
    steps=_STEPS,
    warmup_steps=0,
    **changes,
  )
  labels = {'a': 'poet', 'b': 'poet'}
  return lambda: recipes.from_recipe(small, labels, None, 0)


_EVERY = {'merge_every': 1, 'resample_every': 12, 'block_size': 4}
_LATER = {'merge_every': 12, 'block_size': 4}
_FAST = {'merge_every': 12, 'poet_learning_rate': 1.5e-2}
_ADAM = functools.partial(optax.adam, _DECAY(1.5e-2), eps=1e-6)
_TRANSFORMS: dict[str, Callable[[], optax.GradientTransformationExtraArgs]] = {
  'adam': lambda: poet.poet(_ADAM(), **_LATER),
  'adam, moments kept': lambda: poet.poet(
    _ADAM(), block_size=4, merge_every=4, resample_every=6, reset_inner=False
  ),
  'adam, merged every step': lambda: poet.poet(_ADAM(), **_EVERY),
  'ramp': lambda: poet.poet(_ramped(), **_LATER),
  'orthogonalized': lambda: poet.poet(_orthogonalized(), **_EVERY),
  'orthogonalized, sides in turn': lambda: poet.poet(
    _orthogonalized(poet.alternate_sides()), **_EVERY
  ),
  'poet_bs': _published(recipes.POET_BS['60m', 64], block_size=4, **_FAST),
  'poet_fs': _published(
    recipes.POET_FS['60m', 0.5],
    merge_every=6,
    clip_ramp_steps=2,
    poet_learning_rate=3e-2,
  ),
  'poet_x': _published(recipes.POET_X['3b', 256], block_size=4, **_FAST),
}


def _rotation(rng: np.random.Generator, dim: int) -> np.ndarray:
  rotation, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
  rotation[:, 0] *= np.linalg.det(rotation)  # of the identity's component
  return rotation


def _problem():
  """Start, and a loss whose minimum 0 has the start's singular values.

  Leaf 'a' wants the weights of a goal, 'b' the outputs of a layer that has
  them. Both errors are relative, so the loss starts near 4.
  """
  rng = np.random.default_rng(0)
  start, goal = {}, {}
  for leaf, shape in _SHAPES.items():
    start[leaf] = rng.standard_normal(shape).astype(np.float32)
    left, right = (_rotation(rng, dim) for dim in shape[-2:])
    goal[leaf] = (left @ start[leaf] @ right).astype(np.float32)
  inputs = rng.standard_normal((32, _SHAPES['b'][0])).astype(np.float32)

  def loss(params):
    wrong = jax.tree.map(jnp.subtract, params, goal)
    of_weights = jnp.sum(wrong['a'] ** 2) / np.sum(goal['a'] ** 2)
    of_outputs = jnp.sum((inputs @ wrong['b']) ** 2)
    return of_weights + of_outputs / np.sum((inputs @ goal['b']) ** 2)

  return jax.tree.map(jnp.asarray, start), loss


def _train(tx, params, loss, steps):
  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state):
    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value

  state = jax.jit(tx.init)(params)
  values = []
  for _ in range(steps):
    params, state, value = step(params, state)
    values.append(float(value))
  return params, state, values, step


@pytest.mark.parametrize('name', _TRANSFORMS)
def test_converges_never_recompiles_and_keeps_its_types(name):
  tx = _TRANSFORMS[name]()
  params, loss = _problem()
  first = jax.eval_shape(tx.init, params)
  _, state, values, step = _train(tx, params, loss, _STEPS)
  assert values[-1] < 0.03 * values[0]
  assert step._cache_size() == 1
  chex.assert_trees_all_equal_shapes_and_dtypes(
    first, jax.eval_shape(lambda x: x, state)
  )


# The forms of the program that partition differently.
@pytest.mark.parametrize(
  'name', ['adam', 'poet_fs', 'orthogonalized, sides in turn']
)
def test_eight_devices_make_the_same_steps_and_keep_shardings(name):
  tx = _TRANSFORMS[name]()
  params, loss = _problem()
  expected, _, _, _ = _train(tx, jax.tree.map(jnp.copy, params), loss, 6)
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))
  specs = {
    'a': PartitionSpec(None, 'rows', 'columns'),
    'b': PartitionSpec('columns', 'rows'),
  }
  sharded = jax.tree.map(
    lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, specs
  )
  shardings = jax.tree.map(lambda p: p.sharding, sharded)
  found, state, _, step = _train(tx, sharded, loss, 6)
  chex.assert_trees_all_close(found, expected, atol=1e-5)
  for leaf, sharding in shardings.items():
    assert found[leaf].sharding.is_equivalent_to(sharding, found[leaf].ndim)
  # The zeros of `init` lie everywhere; from the first update on all stays put.
  before = jax.tree.map(lambda x: x.sharding, state)
  compiled = step._cache_size()
  _, state, _ = step(found, state)
  assert step._cache_size() == compiled <= 2
  for was, now in zip(
    jax.tree.leaves(before), jax.tree.leaves(state), strict=True
  ):
    assert now.sharding.is_equivalent_to(was, now.ndim)
