"""Laws of the optimizers over skew coordinates."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import poet
from jaxllm.poet import spectrum


def _coordinates(seed: int = 0, b: int = 16) -> dict[str, poet.Rotation]:
  rng = np.random.default_rng(seed)
  size = b * (b - 1) // 2
  return {
    'w': poet.Rotation(
      jnp.asarray(rng.standard_normal((3, 2, size)), jnp.float32),
      jnp.asarray(rng.standard_normal((3, 1, size)), jnp.float32),
    )
  }


def _apply(tx, updates, **extra):
  return tx.update(updates, tx.init(updates), None, **extra)[0]


def _skew(v):
  b = int((1 + (1 + 8 * v.shape[-1]) ** 0.5) / 2)
  rows, columns = np.triu_indices(b, k=1)
  q = np.zeros((*v.shape[:-1], b, b), np.float32)
  q[..., rows, columns] = v
  return q - np.swapaxes(q, -1, -2)


def test_orthogonalize_turns_all_planes_alike_along_the_same_direction():
  v = _coordinates()['w'].left
  result = _apply(poet.orthogonalize(), {'w': v})['w']
  theta = np.asarray(spectrum.angles(result))
  assert theta.min() > 0.6
  assert theta.max() < 1.3
  before = np.asarray(spectrum.angles(v))
  assert before.max() / before.min() > 5
  # The polar factor shares the eigenvectors, so it commutes with Q.
  q, polar = (np.asarray(_skew(x)) for x in (v, result))
  commutator = q @ polar - polar @ q
  assert np.abs(commutator).max() < 1e-4 * np.abs(q @ polar).max()


@pytest.mark.parametrize('scale', [1e-12, 1.0, 1e6])
def test_orthogonalize_forgets_the_size_of_a_block(scale):
  updates = _coordinates()
  scaled = jax.tree.map(lambda v: scale * v, updates)
  chex.assert_trees_all_close(
    _apply(poet.orthogonalize(), scaled),
    _apply(poet.orthogonalize(), updates),
    atol=1e-5,
  )


@pytest.mark.parametrize(
  'tx',
  [poet.orthogonalize(), poet.scale_by_angle(0.1)],
  ids=['orthogonalize', 'scale_by_angle'],
)
def test_no_gradient_is_no_step(tx):
  zeros = jax.tree.map(jnp.zeros_like, _coordinates())
  chex.assert_trees_all_equal(_apply(tx, zeros), zeros)


@pytest.mark.parametrize('b', [2, 5, 16])
def test_scale_by_angle_turns_by_that_many_radians(b):
  """All planes of R turn by the angle where the direction treats them alike."""
  rng = np.random.default_rng(0)
  planes = b // 2
  basis, _ = np.linalg.qr(rng.standard_normal((b, b)))
  q = np.zeros((b, b))
  for i in range(planes):
    q[2 * i, 2 * i + 1], q[2 * i + 1, 2 * i] = 7.0, -7.0
  q = basis @ q @ basis.T
  v = jnp.asarray(q[np.triu_indices(b, k=1)], jnp.float32)[None]
  step = _apply(poet.scale_by_angle(0.3), {'w': v})['w']
  eigenvalues = np.linalg.eigvals(np.asarray(poet.cayley(step[0])))
  turned = np.sort(np.abs(np.angle(eigenvalues)))
  expected = np.r_[np.zeros(b % 2), np.full(2 * planes, 0.3)]
  np.testing.assert_allclose(turned, expected, atol=1e-5)
  assert float(jnp.sum(step * v)) < 0  # downhill


def test_scale_by_angle_follows_a_schedule():
  v = {'w': jnp.ones((1, 1))}  # b = 2: the vector is theta
  tx = poet.scale_by_angle(lambda count: 0.02 / (1 + count))
  state = tx.init(v)
  first, state = tx.update(v, state)
  second, _ = tx.update(v, state)
  np.testing.assert_allclose(first['w'], -np.tan(0.01), rtol=1e-5)
  np.testing.assert_allclose(second['w'], -np.tan(0.005), rtol=1e-5)


def test_sides_alternate_and_keep_alternating_after_a_reset():
  tx = poet.poet(
    optax.chain(poet.alternate_sides(), poet.scale_by_angle(0.1)),
    block_size=4,
    merge_every=3,
  )
  rng = np.random.default_rng(0)
  params = {'w': jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)}
  gradient = {'w': jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)}
  state = tx.init(params)
  update = jax.jit(lambda params, state: tx.update(gradient, state, params))
  turned = []
  for _ in range(5):
    updates, new_state = update(params, state)
    new = optax.apply_updates(params, updates)
    # Rows mix (W W^T changes) iff the left side turned.
    rows = float(
      jnp.abs(new['w'] @ new['w'].T - params['w'] @ params['w'].T).max()
    )
    turned.append('left' if rows > 1e-3 else 'right')
    params, state = new, new_state
  assert turned == ['left', 'right', 'left', 'right', 'left']


@pytest.mark.parametrize(
  ('steps_since_merge', 'threshold'),
  [(0, 0.1), (5, 0.55), (10, 1.0), (50, 1.0)],
)
def test_the_clip_norm_rises_after_a_merge(steps_since_merge, threshold):
  tx = poet.clip_by_ramped_norm(1.0, ramp_steps=10)
  big = {'a': jnp.full(4, 30.0), 'b': jnp.full(4, 40.0)}
  clipped = _apply(tx, big, steps_since_merge=jnp.int32(steps_since_merge))
  np.testing.assert_allclose(optax.tree.norm(clipped), threshold, rtol=1e-5)
  small = {'a': jnp.full(4, 0.01)}
  kept = _apply(tx, small, steps_since_merge=jnp.int32(steps_since_merge))
  chex.assert_trees_all_close(kept, small)


def test_the_ramp_hears_of_merges_from_poet():
  """SGD makes the threshold visible: |v| after each step, by hand."""
  tx = poet.poet(
    optax.chain(
      poet.clip_by_ramped_norm(1e-3, ramp_steps=2, start=0.5), optax.sgd(1.0)
    ),
    block_size=4,
    merge_every=4,
  )
  rng = np.random.default_rng(0)
  params = {'w': jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)}
  gradient = {'w': jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)}
  state = tx.init(params)
  update = jax.jit(lambda state: tx.update(gradient, state, params))
  norms = [0.0]
  for _ in range(7):
    _, state = update(state)
    norms.append(float(optax.tree.norm(state.rotations)))
  # Gradients hardly change, so norms add up: .5 + .75 + 1, merge, again.
  np.testing.assert_allclose(
    np.multiply(norms, 1e3), [0, 0.5, 1.25, 2.25, 0, 0.5, 1.25, 2.25], rtol=1e-2
  )


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: poet.orthogonalize(steps=0), 'steps=0'),
    (lambda: poet.clip_by_ramped_norm(0.0), 'max_norm=0.0'),
    (lambda: poet.clip_by_ramped_norm(1.0, ramp_steps=0), 'ramp_steps=0'),
    (lambda: poet.clip_by_ramped_norm(1.0, start=0.0), 'start=0.0'),
  ],
)
def test_settings_that_cannot_work_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
