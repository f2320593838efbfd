"""A posted round of the swarm: it ends with its outcome, with its deadline, or when this worker leaves."""

import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.header import pack
from diloco.engines.rounds import Contribution, Member, RoundKey
from diloco.errors import EngineError, Excluded, RoundFailed
from diloco.swarm import timing
from diloco.swarm.pending_round import RoundMemoryPool, SwarmRound, as_tensor
from diloco.swarm.sidecar.messages import PostRound, RoundEnded
from diloco.swarm.sidecar.supervisor import SidecarLost
from diloco.swarm.trainer import PostedRound, PresentWorker, RoundOutcome
from support.round_summary import FULL

KEY = RoundKey(4, 1)


class Owner:
    """Remembers what the round reports."""

    def __init__(self) -> None:
        self.leave_deadline = time.monotonic() + 600.0
        self.ended: list[tuple[PostedRound, RoundOutcome, tuple[Member, ...]]] = []
        self.restarts: list[tuple[int, str]] = []

    def on_round_ended(self, posted: PostedRound, outcome: RoundOutcome, members: tuple[Member, ...]) -> None:
        self.ended.append((posted, outcome, members))

    def restart_sidecar(self, number: int, reason: str) -> None:
        self.restarts.append((number, reason))


class Posted:
    """A round that was just posted; `answer` is the sidecar's."""

    def __init__(self, seconds: float = 600.0) -> None:
        self.owner, self.answer = Owner(), Future[Any]()
        vector = EncodedVector(codec("fp32"), PartLayout(10))
        vector.encode(0, torch.arange(10.0))
        self.contribution = Contribution(vector, 1.0, 1.0, "anchor", "layout")
        memory = RoundMemoryPool().take(KEY.fragment, vector.num_bytes, vector.mean.num_bytes)
        self.header, parts = pack(KEY, self.contribution), len(vector.data)
        self.posted = PostedRound(
            KEY, self.header, b"", "fp32", vector.layout.part_elements, parts, memory.contribution, memory.mean, None,
            seconds,
        )  # fmt: skip
        self.round = SwarmRound(self.owner, self.contribution, PostRound(9, self.posted), self.answer)

    def end(self, **outcome: Any) -> None:
        self.answer.set_result(RoundEnded(9, RoundOutcome(KEY, **outcome)))


def test_the_mean_and_the_members_come_with_the_outcome() -> None:
    posted = Posted()
    as_tensor(posted.posted.mean).fill_(7)
    posted.end(contributors=(0,), total_weight=2.0, present=(PresentWorker(0, posted.header, b"note"),), roster=(0, 3))
    result = posted.round.wait()
    assert set(result.mean.data.flatten().tolist()) == {7}
    assert [(member.worker, member.note) for member in result.members] == [(0, b"note")]
    assert (result.contributors, result.total_weight, result.roster) == ((0,), 2.0, (0, 3))
    assert [(one, members) for one, _, members in posted.owner.ended] == [(posted.posted, result.members)]
    assert posted.round.wait() is result


def test_all_that_the_outcome_tells_of_the_round_is_in_its_result() -> None:
    posted = Posted()
    posted.end(**FULL.summary_fields())
    assert posted.round.wait().summary_fields() == FULL.summary_fields()


def test_a_round_without_weight_leaves_the_contribution_alone() -> None:
    posted = Posted()
    before = posted.contribution.vector.data.clone()
    posted.end()
    assert torch.equal(posted.round.wait().mean.data, before)


def test_a_round_in_flight_fails_when_this_worker_has_no_more_time_to_leave() -> None:
    posted = Posted()
    posted.owner.leave_deadline = time.monotonic()
    with pytest.raises(RoundFailed, match="round 4: it had not ended when this worker left") as caught:
        posted.round.wait()
    assert not caught.value.resync and not posted.owner.ended and not posted.owner.restarts


def test_a_sidecar_that_does_not_answer_by_the_deadline_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "DEADLINE_GRACE_SECONDS", 0.0)
    posted = Posted(seconds=0.0)
    for _ in range(2):
        with pytest.raises(RoundFailed, match="round 4: the swarm's process did not end it in time") as caught:
            posted.round.wait()
        assert caught.value.resync
    assert [number for number, _ in posted.owner.restarts] == [9] and not posted.owner.ended


@pytest.mark.parametrize("error", [SidecarLost("it died"), RoundFailed("it died")])
def test_a_lost_sidecar_fails_the_round_and_asks_for_the_others_state(error: Exception) -> None:
    posted = Posted()
    posted.answer.set_exception(error)
    with pytest.raises(RoundFailed, match=r"^round 4: it died$") as caught:
        posted.round.wait()
    assert caught.value.resync and not posted.owner.ended  # its memory is not used again


def test_a_worker_that_the_swarm_excludes_hears_why() -> None:
    posted = Posted()
    posted.end(failure="worker 0 is banned", fatal=True)
    with pytest.raises(Excluded, match="worker 0 is banned"):
        posted.round.wait()


def test_a_header_of_another_version_is_named() -> None:
    posted = Posted()
    posted.end(present=(PresentWorker(3, b"short", b""),))
    with pytest.raises(EngineError, match=r"worker 3 sent a header of 5 bytes, .* the same version"):
        posted.round.wait()


def test_memory_is_used_again_by_a_later_round_of_the_same_fragment() -> None:
    posted, pool = Posted(), RoundMemoryPool()
    size = posted.posted.mean.num_bytes
    pool.give_back(posted.posted)
    assert pool.take(0, size, size).mean is not posted.posted.mean
    assert pool.take(KEY.fragment, size, size).mean is posted.posted.mean
    assert pool.take(KEY.fragment, size, size).mean is not posted.posted.mean
