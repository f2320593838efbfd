"""Every method is in the registry and in the documentation, and a run without options has none."""

import inspect
from importlib import import_module
from pathlib import Path

import torch

import diloco.methods
from diloco.core.config import NO_FAULTS, FaultsConfig, SyncConfig
from diloco.engines.local import LocalSwarm
from diloco.methods.registry import METHODS, chosen_methods
from diloco.outer.method import Method, Options

FOLDER = Path(diloco.methods.__path__[0])
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "registry"))
DOCS = Path(__file__).parents[2] / "docs" / "methods.md"
EVERY_ONE = (
    SyncConfig(codec="topk", prune=0.5, second_moment_every=2, dynamic_steps=True),
    SyncConfig(outer_overlap="eager"),
)


def chosen(sync: SyncConfig, faults: FaultsConfig = NO_FAULTS) -> list[Method]:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    engine = LocalSwarm(2).engines()[0]
    return chosen_methods(Options(sync, faults, engine, inner, dict(model.named_parameters())))


def test_every_method_in_the_folder_is_in_the_registry() -> None:
    modules = [import_module(f"diloco.methods.{name}") for name in FILES]
    found = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Method) and kind.__module__ == module.__name__
    }
    assert found == set(METHODS) and len(METHODS) == len(set(METHODS))


def test_every_file_of_the_folder_is_in_the_table_of_the_documentation() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [name for name in FILES if not any(f"`methods/{name}.py`" in row for row in rows)] == []


def test_a_run_has_the_methods_of_its_options_and_no_others() -> None:
    assert chosen(SyncConfig()) == []
    kinds = {type(method) for sync in EVERY_ONE for method in chosen(sync, FaultsConfig(0.5))}
    assert kinds == set(METHODS)
    assert [type(method).__name__ for method in chosen(SyncConfig(prune=0.5))] == ["Pruning"]
