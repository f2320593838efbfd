"""What import-linter cannot check: torch in the wrong place, and import cycles of single modules."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import diloco.core

CORE = Path(diloco.core.__path__[0])


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda path: path.stem)
def test_the_core_never_mentions_torch_distributed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [name for name in imported if name.startswith("torch.distributed")]
    assert "distributed" not in attributes


def test_the_configuration_and_the_launcher_import_no_torch() -> None:
    modules = "diloco.training.config.run_file, diloco.training.processes.launcher, diloco.cli.train"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    graph = grimp.build_graph("diloco", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"modules that import each other: {' imports '.join(reversed(error.args[1]))}")


def test_every_benchmark_that_uses_support_makes_it_importable_itself() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next((number for number, line in enumerate(lines) if line.lstrip().startswith("from support")), None)
        assert first is None or any(line.startswith("import search_path") for line in lines[:first]), path.name
