"""The attacks of benchmarks/adversary_real.py: each is there, and changes methods that the swarm's classes have."""

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from support.forks import context

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def apply_all(pipe: Connection) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    import attacks
    from adversary_real import ROWS

    changed: list[str] = []
    honest = attacks.instead_of

    def note(owner: type, method: str):  # type: ignore[no-untyped-def]
        changed.append(f"{owner.__name__}.{method}")
        return honest(owner, method)

    attacks.instead_of = note
    failed = []
    for row in ROWS:
        before = len(changed)
        try:
            if row.attack:
                attacks.begin(row.attack)
        except (AttributeError, ImportError, StopIteration) as error:
            failed.append(f"{row.name}: {error!r}")
        if row.attack and len(changed) < before + 2:  # the node's __init__, and something of the attack
            failed.append(f"{row.name} changes nothing")
    pipe.send((len(ROWS), failed))


def test_every_attack_of_the_benchmark_changes_what_a_member_does() -> None:
    mine, theirs = context.Pipe()
    process = context.Process(target=apply_all, args=(theirs,))
    process.start()
    theirs.close()
    rows, failed = mine.recv()
    process.join()
    assert rows > 25 and failed == []
