"""What the bad member of benchmarks/adversary_real.py does: each attack is a function that changes one behaviour.

The bad member is the same command as any other. Its environment has ATTACK (the name of a function in this package),
ATTACK_FROM (the first round in which it attacks) and patched/ on PYTHONPATH, whose sitecustomize.py calls `begin` in
the member's network process. Nothing of the project itself knows of this.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from diloco.swarm.node.node import Node

FIRST = int(os.environ.get("ATTACK_FROM", "3"))
"""The first round in which the member attacks."""
_MODULES = ("contributions", "means", "rounds", "members", "states", "unchecked")
_nodes: list[Node] = []


def begin(name: str) -> None:
    """Change the classes of this process."""

    @instead_of(Node, "__init__")
    def keep(honest: Callable[..., None], self: Node, *arguments: Any) -> None:
        honest(self, *arguments)
        _nodes[:] = [self]

    modules = [importlib.import_module(f"{__name__}.{module}") for module in _MODULES]
    attack: Callable[[], None] = next(getattr(module, name) for module in modules if hasattr(module, name))
    attack()


def node() -> Node:
    """Return the bad member's node."""
    return _nodes[0]


def has_begun(sequence: int | None = None) -> bool:
    """Whether the bad member attacks in this round; None: in the round that it is in, or posts next."""
    return (node().own.ended_round + 1 if sequence is None else sequence) >= FIRST


def instead_of(owner: Any, method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put a function in the place of a method; its first argument is the honest method."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        honest = getattr(owner, method)

        @functools.wraps(honest)
        def replacement(*arguments: Any, **keywords: Any) -> Any:
            return function(honest, *arguments, **keywords)

        setattr(owner, method, replacement)
        return function

    return put
