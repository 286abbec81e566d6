"""Laws of the POET transform."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.poet import MatrixDimensions
from jaxllm.poet import cayley_neumann
from jaxllm.poet import effective_weights
from jaxllm.poet import poet
from jaxllm.poet import sampling
from jaxllm.poet import spectrum

_ADAM = functools.partial(optax.adam, eps=1e-6)


def _params(seed: int = 0) -> dict[str, jax.Array]:
  rng = np.random.default_rng(seed)
  return {
    'stacked': jnp.asarray(rng.standard_normal((3, 8, 12)), jnp.float32),
    'plain': jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
  }


def _loss(params, target):
  errors = jax.tree.map(lambda p, t: jnp.sum(jnp.sin(p) * t), params, target)
  return sum(jax.tree.leaves(errors))


def _train(tx, params, steps, target, assign=True):
  state = jax.jit(tx.init)(params)

  @jax.jit
  def step(params, state):
    gradients = jax.grad(_loss)(params, target)
    updates, state = tx.update(gradients, state, params, as_weights=assign)
    if assign:
      return updates, state
    return optax.apply_updates(params, updates), state

  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def _dense_rotation(v, order, dim):
  """R = Psi^T Diag Psi, built the slow way."""
  blocks = np.asarray(cayley_neumann(v))
  count, size = blocks.shape[:2]
  diagonal = np.eye(dim)
  for i in range(count):
    at = slice(i * size, (i + 1) * size)
    diagonal[at, at] = blocks[i]
  psi = np.eye(dim)[np.asarray(order)]
  return psi.T @ diagonal @ psi


@pytest.mark.parametrize(
  'form', [{'block_size': 4}, {'fraction': 0.5}], ids=['block', 'fully']
)
def test_weights_are_dense_rotations_of_w0(form):
  params = {'w': _params()['plain']}
  tx = poet(_ADAM(0.05), **form, seed=7)
  params_after, state = _train(tx, params, 3, {'w': jnp.ones((16, 8))})
  rows, columns = sampling.draw(7, 0, [(16,), (8,)], 1)
  rotation = state.rotations['w']
  expected = (
    _dense_rotation(rotation.left, rows.order, 16)
    @ np.asarray(params['w'])
    @ _dense_rotation(rotation.right, columns.order, 8)
  )
  np.testing.assert_allclose(params_after['w'], expected, atol=2e-6)


def test_coordinate_gradient_is_the_gradient_of_the_rebuilt_loss():
  """What `inner` sees equals autodiff through W(v), also away from v = 0."""
  # An inner optimizer whose state is the last gradient that it saw.
  inner = optax.GradientTransformation(
    lambda params: params,
    lambda g, state, params: (jax.tree.map(lambda x: -0.05 * x, g), g),
  )
  tx = poet(inner, block_size=4)
  params, target = {'w': _params()['plain']}, {'w': _params(1)['plain']}

  @jax.jit
  def step(params, state):
    gradients = jax.grad(_loss)(params, target)
    new_params, new_state = tx.update(gradients, state, params, as_weights=True)
    expected = jax.grad(
      lambda rotations: _loss(
        effective_weights(state._replace(rotations=rotations), params), target
      )
    )(state.rotations)
    return new_params, new_state, expected

  state = tx.init(params)
  for _ in range(2):
    params, state, expected = step(params, state)
    chex.assert_trees_all_close(state.inner, expected, rtol=1e-4, atol=1e-5)


def test_singular_values_stay_within_the_closed_form_over_200_steps():
  """A merge multiplies by at least the smallest 1 - theta^4 of each side."""
  params, target = _params(), _params(1)
  tx = poet(_ADAM(0.01), block_size=4, merge_every=40)
  start = jax.tree.map(spectrum.singular_values, params)
  state = tx.init(params)

  @jax.jit
  def step(params, state):
    gradients = jax.grad(_loss)(params, target)
    params, state = tx.update(gradients, state, params, as_weights=True)
    ratios = jax.tree.map(
      lambda w, s: spectrum.singular_values(w) / s, params, start
    )
    ratios = jnp.concatenate([r.reshape(-1) for r in jax.tree.leaves(ratios)])
    return params, state, (jnp.min(ratios), jnp.max(ratios))

  shrink, largest = 1.0, 0.0
  for count in range(1, 201):
    params, state, (low, high) = step(params, state)
    # Power iteration finds 4 x 4 blocks' angles to a percent, from below.
    theta = 1.02 * float(state.readings.largest_angle)
    bound = (1 - theta**4) ** 2
    assert shrink * bound - 1e-5 <= float(low)
    assert float(high) <= 1 + 1e-5
    if count % 40 == 0:
      shrink *= bound
    largest = max(largest, theta)
  assert 0.1 < largest < 0.9
  assert shrink < 0.999  # the law had something to say
  moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), params, _params())
  assert min(jax.tree.leaves(moved)) > 0.1


def test_merging_changes_the_coordinates_but_not_the_weights():
  params, target = _params(), _params(1)
  tx = poet(_ADAM(0.02), block_size=4, merge_every=3)
  weights, state = _train(tx, params, 3, target)
  chex.assert_trees_all_equal(state.w0, weights)
  chex.assert_trees_all_equal(
    state.rotations, jax.tree.map(jnp.zeros_like, state.rotations)
  )
  never = poet(_ADAM(0.02), block_size=4, merge_every=1000)
  expected, _ = _train(never, params, 3, target)
  chex.assert_trees_all_close(weights, expected, atol=1e-6)


def test_a_merge_draws_new_permutations():
  params = {'w': _params()['plain']}
  tx = poet(_ADAM(0.02), block_size=4, merge_every=2, seed=3)
  weights, state = _train(tx, params, 3, {'w': jnp.ones((16, 8))})
  rows, columns = sampling.draw(3, 1, [(16,), (8,)], 1)
  expected = (
    _dense_rotation(state.rotations['w'].left, rows.order, 16)
    @ np.asarray(state.w0['w'])
    @ _dense_rotation(state.rotations['w'].right, columns.order, 8)
  )
  np.testing.assert_allclose(weights['w'], expected, atol=2e-6)
  old_rows, _ = sampling.draw(3, 0, [(16,), (8,)], 1)
  assert rows.order.tolist() != old_rows.order.tolist()


@pytest.mark.parametrize('reset', [True, False])
def test_a_merge_resets_moments_but_not_schedules(reset):
  schedule = optax.linear_schedule(1.0, 0.0, 10)
  inner = optax.chain(
    optax.scale_by_adam(), optax.scale_by_learning_rate(schedule)
  )
  tx = poet(inner, block_size=4, merge_every=4, reset_inner=reset)
  params, target = _params(), _params(1)
  _, state = _train(tx, params, 4, target)
  adam, scheduled = state.inner
  assert scheduled.count == 4
  assert adam.count == (0 if reset else 4)
  moments = jnp.concatenate([m.reshape(-1) for m in jax.tree.leaves(adam.mu)])
  assert bool(jnp.all(moments == 0)) == reset


def test_injected_hyperparameters_survive_a_merge():
  inner = optax.inject_hyperparams(optax.adam)(
    learning_rate=optax.linear_schedule(1e-2, 0.0, 10)
  )
  tx = poet(inner, block_size=4, merge_every=2)
  _, state = _train(tx, _params(), 3, _params(1))
  assert state.inner.count == 3
  # The rate of step index 2, not of a restarted schedule.
  np.testing.assert_allclose(
    state.inner.hyperparams['learning_rate'], 1e-2 * 0.8, rtol=1e-6
  )


def test_inner_is_told_the_steps_since_the_merge():
  def update(updates, state, params, *, steps_since_merge, **extra):
    zeros = jax.tree.map(jnp.zeros_like, updates)
    return zeros, jnp.append(state[1:], steps_since_merge)

  inner = optax.GradientTransformationExtraArgs(
    lambda params: jnp.full(5, -1), update
  )
  tx = poet(inner, block_size=4, merge_every=3, reset_inner=False)
  _, state = _train(tx, _params(), 5, _params(1))
  assert state.inner.tolist() == [0, 1, 2, 0, 1]


def test_merging_every_step_stores_moments_only():
  params = {'w': jnp.zeros((64, 32))}
  tx = poet(_ADAM(1e-2), block_size=8, merge_every=1, reset_inner=False)
  state = tx.init(params)
  sizes = [x.size for x in jax.tree.leaves(state)]
  coordinates = (64 + 32) * 7 // 2
  assert sum(sizes) <= 2 * coordinates + 8
  tx = poet(_ADAM(1e-2), block_size=4, merge_every=1, reset_inner=False)
  weights, _ = _train(tx, _params(), 20, _params(1), assign=False)
  start = jax.tree.map(spectrum.singular_values, _params())
  end = jax.tree.map(spectrum.singular_values, weights)
  chex.assert_trees_all_close(end, start, rtol=1e-3)
  assert _loss(weights, _params(1)) < _loss(_params(), _params(1)) - 1


def test_merging_every_step_starts_like_merging_later():
  target = _params(1)
  every = poet(_ADAM(1e-2), block_size=4, merge_every=1, reset_inner=False)
  later = poet(_ADAM(1e-2), block_size=4)
  first, _ = _train(every, _params(), 1, target, assign=False)
  second, _ = _train(later, _params(), 1, target, assign=False)
  chex.assert_trees_all_close(first, second, atol=1e-6)


@pytest.mark.parametrize('merge_every', [1, 3])
def test_bfloat16_params_keep_a_float32_master(merge_every):
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _params())
  tx = poet(
    _ADAM(1e-5), block_size=4, merge_every=merge_every, reset_inner=False
  )
  weights, state = _train(tx, params, 6, _params(1), assign=False)
  assert jax.tree.leaves(weights)[0].dtype == jnp.bfloat16
  assert jax.tree.leaves(state.w0)[0].dtype == jnp.float32
  # Six steps too small for bfloat16 are not lost.
  gap = jax.tree.map(
    lambda master, p: jnp.max(jnp.abs(master - p.astype(jnp.float32))),
    state.w0,
    params,
  )
  assert min(jax.tree.leaves(gap)) > 1e-6


def test_init_copies_so_that_donation_works_and_nothing_recompiles():
  params, target = _params(), _params(1)
  tx = poet(_ADAM(1e-2), block_size=4, merge_every=2)
  state = tx.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state):
    gradients = jax.grad(_loss)(params, target)
    return tx.update(gradients, state, params, as_weights=True)

  for _ in range(5):
    params, state = step(params, state)
  assert step._cache_size() == 1
  assert not any(bool(jnp.isnan(p).any()) for p in jax.tree.leaves(params))


def test_assigned_weights_depend_on_the_state_alone():
  params, target = _params(), _params(1)
  tx = poet(_ADAM(1e-2), block_size=4, merge_every=3)
  weights, state = _train(tx, params, 5, target)
  noise = jax.tree.map(lambda p: p + 123.0, weights)
  rebuilt = jax.jit(effective_weights)(state, noise)
  chex.assert_trees_all_equal(rebuilt, weights)


def test_a_foreign_write_shows_as_norm_drift():
  params, target = _params(), _params(1)
  tx = poet(_ADAM(1e-2), block_size=4)
  weights, state = _train(tx, params, 3, target)
  assert float(state.readings.norm_drift) < 1e-5
  weights['plain'] = weights['plain'].at[3, 3].add(0.5)
  _, state = jax.jit(tx.update)(weights, state, weights)
  assert float(state.readings.norm_drift) > 1e-4


def test_other_matrix_axes_are_a_transpose():
  params = {'w': jnp.asarray(_params()['stacked'])}
  moved = {'w': jnp.moveaxis(params['w'], (1, 2), (2, 0))}  # [12, 3, 8]
  target = {'w': _params(1)['stacked']}
  moved_target = {'w': jnp.moveaxis(target['w'], (1, 2), (2, 0))}
  expected, _ = _train(poet(_ADAM(1e-2), block_size=4), params, 3, target)
  for numbers in (
    MatrixDimensions(input=2, output=0),
    {'w': MatrixDimensions(input=2, output=0)},
    lambda params: jax.tree.map(lambda _: MatrixDimensions(2, 0), params),
  ):
    tx = poet(_ADAM(1e-2), block_size=4, dimension_numbers=numbers)
    found, _ = _train(tx, moved, 3, moved_target)
    chex.assert_trees_all_close(
      jnp.moveaxis(found['w'], (2, 0), (1, 2)), expected['w'], atol=1e-6
    )


@pytest.mark.parametrize('form', [{'block_size': 4}, {'fraction': 0.5}])
def test_partitions_do_not_mix_rows(form):
  """With W0 = I, the blocks of W between partitions stay zero."""
  params = {'w': jnp.eye(16)}
  target = {
    'w': jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)))
  }
  tx = poet(_ADAM(1e-1), **form, partitions=2, merge_every=2)
  weights, _ = _train(tx, params, 5, jax.tree.map(jnp.float32, target))
  inside = weights['w'].reshape(2, 8, 2, 8)
  assert float(jnp.abs(inside[0, :, 1]).max()) == 0
  assert float(jnp.abs(inside[0, :, 0] - jnp.eye(8)).max()) > 0.1


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({}, 'exactly one'),
    ({'block_size': 4, 'fraction': 0.5}, 'exactly one'),
    ({'block_size': 1}, 'needs 2'),
    ({'fraction': 1.5}, r'not in \(0, 1\]'),
    ({'block_size': 4, 'merge_every': 0}, 'merge_every=0'),
    ({'block_size': 4, 'merge_every': 1}, 'reset_inner=False'),
    ({'block_size': 4, 'resample_every': 0}, 'resample_every=0'),
    ({'block_size': 4, 'neumann_terms': 0}, 'neumann_terms=0'),
    ({'block_size': 4, 'partitions': 0}, 'partitions=0'),
  ],
)
def test_settings_that_cannot_work_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    poet(optax.adam(1e-3), **arguments)


def test_works_inside_partition_multi_steps_and_tree_map_params():
  params = {'w': _params()['plain'], 'b': jnp.zeros(8)}
  tx = optax.partition(
    {'poet': poet(_ADAM(1e-2), block_size=4), 'adam': optax.adam(1e-2)},
    {'w': 'poet', 'b': 'adam'},
  )
  multi = optax.MultiSteps(tx, every_k_schedule=2)
  state = multi.init(params)
  gradients = jax.tree.map(jnp.ones_like, params)
  for _ in range(2):
    updates, state = multi.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  assert float(jnp.abs(params['b']).max()) > 0
  inner = state.inner_opt_state.inner_states['poet'].inner_state
  assert inner.count == 1
  doubled = (
    optax.tree.map_params(tx, lambda x: x * 2, state.inner_opt_state)
    .inner_states['poet']
    .inner_state
  )
  chex.assert_trees_all_equal(
    doubled.w0, jax.tree.map(lambda x: x * 2, inner.w0)
  )


def test_update_needs_params():
  tx = poet(optax.adam(1e-3), block_size=4)
  state = tx.init(_params())
  with pytest.raises(ValueError, match='pass them'):
    tx.update(_params(), state)


def test_coordinates_keep_their_meaning_until_permutations_are_drawn_again():
  """Two merges with one draw: the second turns the same rows as the first."""
  params = {'w': _params()['plain']}
  tx = poet(_ADAM(0.02), block_size=4, merge_every=2, resample_every=3, seed=3)
  for steps, draw in ((3, 0), (5, 0), (7, 1)):
    weights, state = _train(tx, params, steps, {'w': jnp.ones((16, 8))})
    rows, columns = sampling.draw(3, draw, [(16,), (8,)], 1)
    expected = (
      _dense_rotation(state.rotations['w'].left, rows.order, 16)
      @ np.asarray(state.w0['w'])
      @ _dense_rotation(state.rotations['w'].right, columns.order, 8)
    )
    np.testing.assert_allclose(weights['w'], expected, atol=2e-6)
    assert int(state.inner[0].count) == steps % 6


@pytest.mark.parametrize('reset', [True, False])
def test_new_permutations_reset_the_moments_of_merging_every_step(reset):
  tx = poet(
    _ADAM(1e-2),
    block_size=4,
    merge_every=1,
    resample_every=3,
    reset_inner=reset,
  )
  _, state = _train(tx, _params(), 4, _params(1))
  assert int(state.inner[0].count) == (1 if reset else 4)
