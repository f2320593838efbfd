"""The local engine alone: deadlines, faults on purpose, and what a start sends."""

import threading
from typing import Any

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.local import LocalEngine, LocalSwarm
from diloco.engines.rounds import GlobalState, RoundKey
from diloco.errors import EngineError, RoundFailed
from diloco.optimizer import DiLoCo
from support.problem import net
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


def test_a_round_that_a_worker_has_given_up_goes_when_the_last_worker_has_its_mean() -> None:
    swarm = LocalSwarm(2)
    first, second = swarm.engines()
    assert "nothing from workers [1]" in message(lambda: average(first, seconds=0.0), RoundFailed)
    average(second)
    assert not swarm.rounds, "its contributions would stay in memory"


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


def sent_at_the_start(monkeypatch: pytest.MonkeyPatch, *, restoring: bool) -> list[set[str]]:
    """The names of the tensors that each worker serves while it asks for the others' state."""
    sent: list[set[str]] = []
    fetch = LocalEngine.fetch_state

    def recorded(engine: LocalEngine) -> GlobalState | None:
        sent.append(set(engine.swarm.providers[engine.worker]().tensors))
        return fetch(engine)

    monkeypatch.setattr(LocalEngine, "fetch_state", recorded)
    for engine in LocalSwarm(2).engines():
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(model, inner, engine, sync=SyncConfig(4, fragments=2), restoring=restoring)
    return sent


def test_a_fresh_start_sends_anchors_and_no_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in sent_at_the_start(monkeypatch, restoring=False):
        assert names == {"0.anchor", "1.anchor", "2.anchor"}


def test_a_start_that_a_saved_state_follows_sends_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent_at_the_start(monkeypatch, restoring=True) == [set(), set()]
