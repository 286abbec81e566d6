"""Derived numbers and the signs that training must stop."""

import math

import pytest

from jaxllm.train import metrics

_HEALTHY = {'loss': 2.0, 'grad_norm': 1.0, 'param_norm': 9.0}


def test_perplexity_is_the_exponential_and_never_overflows():
  assert metrics.perplexity(0.0) == 1.0
  assert metrics.perplexity(math.log(7.0)) == pytest.approx(7.0)
  assert metrics.perplexity(1e4) == math.inf


def test_utilization_is_known_for_known_devices_only():
  found = metrics.model_flops_utilization(
    1e4, 9.89e9, 'NVIDIA H100 80GB HBM3', devices=2
  )
  assert found == pytest.approx(0.05)
  assert metrics.model_flops_utilization(1e4, 1e9, 'cpu', devices=1) is None


def test_healthy_numbers_are_no_problem():
  assert metrics.problem(_HEALTHY) is None
  assert metrics.problem({**_HEALTHY, 'poet/largest_angle': 0.99}) is None


@pytest.mark.parametrize(
  'name', ['loss', 'grad_norm', 'param_norm', 'validation_loss']
)
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_what_is_not_finite_is_a_problem(name, value):
  assert name in metrics.problem({**_HEALTHY, name: value})


@pytest.mark.parametrize('angle', [1.0, math.nan])
def test_angles_from_one_on_are_a_problem(angle):
  problem = metrics.problem({**_HEALTHY, 'poet/largest_angle': angle})
  assert 'merge_every' in problem
