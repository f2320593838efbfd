"""The code that a laboratory result depends on, as one short hash: the last part of the name of a result's file.

It covers every module of the package that the simulator imports, directly or through others, and what a user's
experiment file adds to them (an optimizer, a codec, a merge). Comments and docstrings do not count, and neither do the
functions in which an experiment describes its arms, claims and figures: arms have keys of their own.
"""

import ast
import hashlib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import diloco
from diloco.version import __version__

_ROOT = Path(diloco.__path__[0])
_SIMULATOR = "diloco.lab.simulation.simulator"
_NOT_SIMULATED = "diloco.swarm"
"""Simulated workers meet over the local engine: what a swarm's network does changes no result."""


@cache
def simulation_code() -> str:
    """Hash the code of the simulator and of all that it imports from this package."""
    hasher = hashlib.sha256()
    for module, path in sorted(_imported_modules(_SIMULATOR).items()):
        hasher.update(f"{module}\n{_without_docstrings(_parse(path))}\n".encode())
    return hasher.hexdigest()[:10]


def code_version() -> str:
    """Return the package's version and the hash of the simulation's code, which are known also where there is no
    git."""
    return f"{__version__}+{simulation_code()}"


def code_of_file(path: Path, describing_functions: Collection[str]) -> str:
    """Hash what an experiment file adds to the package; empty if it only describes arms, claims and figures.

    `describing_functions` do that (`arms`, `claims`, …) and are left out.
    """
    tree = _parse(path)
    tree.body = [node for node in tree.body if not _only_describes(node, describing_functions)]
    if all(isinstance(node, ast.Assign) and _is_literal(node.value) for node in tree.body):
        return ""
    return hashlib.sha256(_without_docstrings(tree).encode()).hexdigest()[:10]


def _only_describes(node: ast.stmt, describing_functions: Collection[str]) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name in describing_functions
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "EXPERIMENT" for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # the docstring


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _imported_modules(root: str) -> dict[str, Path]:
    """Find all modules of the package that `root` needs, by name. Imports inside functions count too."""
    modules: dict[str, Path] = {}
    unread = [root]
    while unread:
        module = unread.pop()
        path = _path_of(module)
        if module in modules or path is None or module.startswith(_NOT_SIMULATED):
            continue
        modules[module] = path
        unread += _imports(_parse(path))
    return modules


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path_of(module: str) -> Path | None:
    """Return the module's file; None for a name that is no module of this package."""
    package, *parts = module.split(".")
    if package != "diloco":
        return None
    base = _ROOT.joinpath(*parts)
    candidates = (base / "__init__.py", base.with_suffix(".py")) if parts else (base / "__init__.py",)
    return next((path for path in candidates if path.is_file()), None)


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _without_docstrings(tree: ast.AST) -> str:
    """Write a syntax tree without docstrings as text."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            statements = [
                statement
                for statement in body
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            ]
            node.body = statements  # type: ignore[attr-defined]
    return _written(tree)


def _written(value: object) -> str:
    """Write a syntax tree as text that does not depend on the version of Python: without the fields that are empty.

    A later version may add fields, such as the type parameters of a function, which earlier code leaves empty.
    """
    if isinstance(value, ast.Constant):
        return f"Constant({value.value!r})"
    if isinstance(value, ast.AST):
        fields = {name: field for name, field in ast.iter_fields(value) if field is not None and field != []}
        return f"{type(value).__name__}({', '.join(f'{name}={_written(field)}' for name, field in fields.items())})"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return repr(value)
