"""Invariants and their readings."""

import jax.numpy as jnp
import numpy as np

from jaxllm import poet
from jaxllm.poet import spectrum


def _matrix(shape=(3, 12, 20)):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _rotation(b, seed):
  v = np.random.default_rng(seed).standard_normal(b * (b - 1) // 2)
  return poet.cayley(jnp.asarray(v, jnp.float32))


def test_entropy_is_one_for_equal_and_zero_for_one_singular_value():
  values = jnp.asarray([[2.0, 2.0, 2.0], [5.0, 0.0, 0.0]])
  np.testing.assert_allclose(
    spectrum.spectral_entropy(values), [1.0, 0.0], atol=1e-6
  )


def test_rotations_of_both_sides_keep_the_entropy():
  w = _matrix()
  turned = _rotation(12, 0) @ w @ _rotation(20, 1)
  before, after = (
    spectrum.spectral_entropy(spectrum.singular_values(x)) for x in (w, turned)
  )
  assert before.shape == (3,)
  assert float(before.max()) < 0.99
  np.testing.assert_allclose(after, before, rtol=1e-5)


def test_energy_equals_the_sum_over_pairs():
  w = _matrix()
  neurons = np.asarray(w / jnp.linalg.norm(w, axis=-2, keepdims=True))[1].T
  pairs = [
    1 / np.linalg.norm(a - b)
    for i, a in enumerate(neurons)
    for j, b in enumerate(neurons)
    if i != j
  ]
  energy = spectrum.hyperspherical_energy(w)
  np.testing.assert_allclose(energy[1], np.mean(pairs), rtol=1e-5)


def test_turning_the_inputs_keeps_the_energy_and_clustering_raises_it():
  w = _matrix()
  before = spectrum.hyperspherical_energy(w)
  turned = spectrum.hyperspherical_energy(_rotation(12, 0) @ w)
  np.testing.assert_allclose(turned, before, rtol=1e-5)
  clustered = spectrum.hyperspherical_energy(w + 3.0)
  assert bool(jnp.all(clustered > 1.2 * before))


def test_energy_of_equal_neurons_is_finite():
  assert float(spectrum.hyperspherical_energy(jnp.ones((4, 2)))) < 1e4
