"""Imports go down: the rules of BUILD.md, read from the source."""

import ast
import pathlib
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGES = ('jaxllm', 'launch', 'configs', 'benchmarks', 'examples')
_FILES = sorted(f for p in _PACKAGES for f in (_ROOT / p).rglob('*.py'))


def _module(file: pathlib.Path) -> str:
  parts = file.relative_to(_ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def _imports(file: pathlib.Path) -> set[str]:
  """Full names of the modules (or names in modules) that a file imports."""
  found = set()
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{file}: relative import'
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


_MODULES = {_module(file): file for file in _FILES}


def _inside(name: str, package: str) -> bool:
  return name == package or name.startswith(f'{package}.')


def _refused(file: pathlib.Path) -> tuple[str, ...]:
  """Packages that this file must not import."""
  module = _module(file)
  if _inside(module, 'jaxllm'):
    return (
      *('launch', 'configs', 'absl', 'ml_collections', 'orbax', 'grain'),
      *('os', 'io', 'pathlib', 'time', 'datetime', 'logging', 'socket'),
      *('subprocess', 'threading', 'shutil', 'tempfile'),
    )
  if _inside(module, 'launch.control') or module == 'launch.main':
    return 'jax', 'jaxlib', 'jaxllm', 'flax', 'optax', 'numpy', 'launch.worker'
  return ()


@pytest.mark.parametrize('file', _FILES, ids=_module)
def test_no_file_imports_what_its_floor_must_not(file):
  for name in _imports(file):
    for package in _refused(file):
      assert not _inside(name, package), f'{_module(file)} imports {name}'


def test_poet_needs_jax_numpy_and_optax_only():
  standard = set(sys.stdlib_module_names)
  for module, file in _MODULES.items():
    if _inside(module, 'jaxllm.poet'):
      for name in _imports(file):
        top = name.partition('.')[0]
        assert top in {'jax', 'numpy', 'optax'} | standard or _inside(
          name, 'jaxllm.poet'
        ), f'{module} imports {name}'


def test_configs_import_ml_collections_only():
  for module, file in _MODULES.items():
    if _inside(module, 'configs'):
      assert _imports(file) == {'ml_collections'}, module


def test_imports_have_no_circle():
  edges = {
    module: {
      other
      for name in _imports(file)
      for other in (name, name.rpartition('.')[0])
      if other in _MODULES
      and other != module
      # `from jaxllm.poet import blocks` inside the package imports the module.
      and not (other != name and name in _MODULES)
    }
    for module, file in _MODULES.items()
  }
  done, path = set(), []

  def visit(module):
    assert module not in path, ' -> '.join([*path, module])
    if module in done:
      return
    path.append(module)
    for other in sorted(edges[module]):
      visit(other)
    path.pop()
    done.add(module)

  for module in sorted(edges):
    visit(module)


def test_files_and_functions_are_short():
  for file in [*_FILES, *(_ROOT / 'tests').rglob('*.py')]:
    source = file.read_text()
    assert source.count('\n') <= 400, file
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.FunctionDef):
        docstring = ast.get_docstring(node) or ''
        if node.name == 'get_config':  # a list of settings
          continue
        lines = node.end_lineno - node.lineno - docstring.count('\n')
        assert lines <= 60, f'{file}: {node.name} has {lines} lines'


def test_the_map_names_every_file():
  text = (_ROOT / 'BUILD.md').read_text()
  for file in _FILES:
    if file.name != '__init__.py':
      assert f'`{file.relative_to(_ROOT)}`' in text, file
