"""The example runs where only jax, optax and their needs are installed."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLE = _ROOT / 'examples' / 'poet_in_your_code.py'


def _requirements(names: list[str]) -> set[str]:
  """The distributions that `names` need, themselves included; no extras."""
  found, todo = set(), list(names)
  while todo:
    name = todo.pop()
    if name in found:
      continue
    found.add(name)
    for requirement in importlib.metadata.requires(name) or ():
      if 'extra ==' not in requirement:
        todo.append(re.match(r'[\w.-]+', requirement)[0].lower())
  return found


@pytest.fixture(name='site')
def _site(tmp_path):
  """A directory with links to these distributions and to jaxllm's code."""
  for name in _requirements(['jax', 'optax']):
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files}:
      source, link = distribution.locate_file(top), tmp_path / top
      if top not in ('..', '__pycache__') and not link.exists():
        link.symlink_to(source)
  (tmp_path / 'jaxllm').symlink_to(_ROOT / 'jaxllm')
  return tmp_path


def _run(site: pathlib.Path, script: str):
  return subprocess.run(
    # -S leaves out the site-packages of this environment, -I its variables.
    [
      *(sys.executable, '-I', '-S', '-c'),
      f'import runpy, sys; sys.path.insert(0, {str(site)!r});'
      f' runpy.run_path({script!r})',
    ],
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_example_trains_with_jax_and_optax_alone(site):
  for missing in ('flax', 'orbax', 'absl_flags', 'pytest'):
    assert not (site / missing).exists()
  done = _run(site, str(_EXAMPLE))
  assert done.returncode == 0, done.stderr
  lines = [line.split() for line in done.stdout.splitlines()]
  losses = [float(line[3]) for line in lines]
  drifts = [float(line[-1].rstrip('%')) for line in lines]
  assert losses[-1] < 0.02 * losses[0]
  assert max(drifts) < 1.0


def test_the_environment_of_that_test_has_nothing_else(site, tmp_path):
  script = tmp_path / 'script.py'
  script.write_text('import flax')
  done = _run(site, str(script))
  assert "No module named 'flax'" in done.stderr


def test_example_is_short_enough_to_paste():
  assert len(_EXAMPLE.read_text().splitlines()) < 40
