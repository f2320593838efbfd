"""Each fact of a worker, a peer and a round has one writer: a class in protocol/, whose methods tell what happened."""

import ast
from pathlib import Path

import pytest

import diloco.swarm

ROOT = Path(diloco.swarm.__path__[0])
OWN = {
    "has_state",
    "ended_round",
    "next_round",
    "waiting_round",
    "contributed_round",
    "position",
    "run_tokens",
    "process",
}
"""Written by OwnStatus."""
ROUND = {
    "leader",
    "authority",
    "plan",
    "vote",
    "certificate",
    "refusals",
    "planned_at",
    "cleared",
    "comparison",
    "result",
}
"""Written by RoundState, and of a led round by LedRoundState."""
JOIN = {"admitted", "wished_number", "final_error"}
"""Written by JoinState."""
PEER = {
    "heard_at",
    "asked_at",
    "live",
    "left",
    "lost_at",
    "rejects",
    "rival",
    "knows",
    "told",
    "credential",
    "latency_seconds",
}
"""Written by Peer."""
LIARS = ROOT / "simulator" / "lies.py"
STORIES = ROOT / "simulator" / "stories.py"
"""A machine that sleeps, whose clock stands still."""


def _written_to_others(path: Path) -> list[tuple[str, int]]:
    """The attributes that a module sets on anything but `self`, and the lines."""
    written = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        attributes = [part for part in parts if isinstance(part, ast.Attribute)]
        written += [(part.attr, node.lineno) for part in attributes if not _is_self(part.value)]
    return written


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "self"


@pytest.mark.parametrize(
    "path", sorted({*ROOT.rglob("*.py")} - {LIARS, STORIES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_module_writes_the_facts_of_a_worker_a_peer_or_a_round_but_their_own_class(path: Path) -> None:
    wrong = [f"line {line}: {name}" for name, line in _written_to_others(path) if name in OWN | ROUND | PEER | JOIN]
    assert not wrong, f"{path.name} writes these itself: {wrong}"


def test_a_writer_elsewhere_would_be_found() -> None:
    """A liar writes what it likes."""
    assert {"ended_round"} <= {name for name, _ in _written_to_others(LIARS)}
    assert {"heard_at", "asked_at"} <= {name for name, _ in _written_to_others(STORIES)}
