"""The chaos run of benchmarks/chaos.py in its short form: real workers, killed, frozen, lied to and joined."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from chaos import outcome, short

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_whatever_is_done_to_its_workers_the_swarm_trains_on_as_one(tmp_path: Path) -> None:
    told = outcome(short(seed=3), tmp_path)
    assert told.faults == []
    assert told.counts["members banned"] == 2
    deeds = " ".join(deed for _, _, deed in told.done)
    for certain in ("SIGKILL for founder", "SIGSTOP", "joins", "comes back to life", "without an invitation"):
        assert certain in deeds
    assert told.joins and set(told.joins.values()) <= {
        0,
        1,
    }  # 0 where the machine is not too busy; some are killed first
