"""The calls of some seeded schedules are those that were recorded: the protocol does what it has always done.

`benchmarks/frozen_schedules.py` compares all that tests/golden/swarm/schedules.json has, and records 2,000 anew.
"""

import json
from pathlib import Path

import pytest

from diloco.swarm.simulator import schedules

GOLDEN = Path(__file__).parents[2] / "golden" / "swarm" / "schedules.json"
SEEDS = {0: range(0, 1000, 80), 1: range(0, 500, 80), 2: range(0, 500, 80)}


@pytest.mark.parametrize(("lies", "seed"), [(lies, seed) for lies, seeds in SEEDS.items() for seed in seeds])
def test_a_schedule_has_the_calls_that_were_recorded(lies: int, seed: int) -> None:
    """If it has others, and none of them was meant to change: `MemoryNetwork.trace.keep` shows where two runs part."""
    result = schedules.run(seed, lies=schedules.lies_of(seed, lies) if lies else ())
    recorded = json.loads(GOLDEN.read_text())[str(lies)].split()[seed]
    assert result.calls.startswith(recorded)


def test_the_recorded_digests_are_of_different_runs() -> None:
    rows = {lies: row.split() for lies, row in json.loads(GOLDEN.read_text()).items()}
    assert {lies: len(row) for lies, row in rows.items()} == {"0": 1000, "1": 500, "2": 500}
    recorded = [digest for row in rows.values() for digest in row if digest != "-"]
    assert len(recorded) == len(set(recorded)) >= 50
