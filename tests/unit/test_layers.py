"""What import-linter cannot say: the core does not know torch.distributed, and options do not need torch."""

import ast
import subprocess
import sys
from pathlib import Path

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
