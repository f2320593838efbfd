"""The local engine alone: deadlines, and faults on purpose."""

import threading
from typing import Any

from diloco.engines.base import Engine
from diloco.engines.rounds import RoundKey
from diloco.errors import EngineError, RoundFailed
from support.rounds import average, contribution, decoded, message, plain_mean, values
from support.threads import in_threads


def test_a_silent_worker_fails_the_round_at_its_deadline_and_what_was_sent_is_not_counted_twice() -> None:
    """Worker 0 gives up; when worker 1 comes late, it gets its own contribution alone."""
    gave_up = threading.Event()

    def late(engine: Engine) -> Any:
        if engine.worker == 0:
            reason = message(lambda: average(engine, seconds=0.05), RoundFailed)
            gave_up.set()
            return reason
        assert gave_up.wait(20.0)
        result = average(engine)
        return result.contributors, decoded(result)

    reason, (contributors, mean) = in_threads(2, late)
    assert reason == "round 0: nothing from workers [1] before the deadline"
    assert contributors == (1,) and mean == values(1).tolist()


def test_a_contribution_lost_on_purpose_is_in_nobodys_mean() -> None:
    def round_zero(engine: Engine) -> Any:
        if engine.worker == 2:
            return message(lambda: average(engine), RoundFailed)
        result = average(engine)
        return result.contributors, result.total_weight, decoded(result)

    first, second, lost = in_threads(3, round_zero, fail_at=[(2, 0)])
    assert first == second == ((0, 1), 2.0, plain_mean(0, 1).tolist())
    assert "dropped on purpose" in lost


def test_posting_a_round_twice_is_refused() -> None:
    def twice(engine: Engine) -> str:
        engine.start_round(RoundKey(0, 0), contribution(engine), 0.0)
        return message(lambda: engine.start_round(RoundKey(0, 0), contribution(engine), 0.0), EngineError)

    assert in_threads(2, twice)[0] == "worker 0 posted round 0 twice"
