"""What the first rank of a worker hears, all its ranks hear, errors too."""

import threading
from collections.abc import Callable

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines import first_rank
from diloco.engines.base import Engine, PendingRound
from diloco.engines.first_rank import FirstRankEngine, connect_first
from diloco.engines.rounds import Contribution, GlobalState, Member, Report, RoundKey, RoundResult
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import DiLoCoError, EngineError, Excluded, RendezvousError, RoundFailed
from support.thread_ranks import on_ranks

KEY = RoundKey(3, 0)


class Pending(PendingRound):
    def __init__(self, answer: Callable[[], RoundResult]) -> None:
        self._answer = answer

    def wait(self) -> RoundResult:
        return self._answer()


class Scripted(Engine):
    """The first rank's engine: its rounds and its number are those of the test."""

    elastic = True

    def __init__(self, answer: Callable[[], RoundResult]) -> None:
        self.worker = 5
        self.workers = 7
        self.answer = answer
        self.provider: Callable[[], GlobalState] | None = None

    def wanted(self, sequence: int) -> bool:
        return sequence <= 4

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        del key, contribution, deadline_seconds
        return Pending(self.answer)

    def members(self) -> tuple[Member, ...]:
        return ()

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self.provider = provider

    def fetch_state(self) -> GlobalState | None:
        means = ((RoundKey(8, 1), torch.arange(70, dtype=torch.uint8).view(7, 10)),)
        return GlobalState({"x": torch.ones(3)}, {"sequence": 9}, "layout", means, frozenset({8}), 4, b"\1\2")

    def close(self) -> None: ...


def result() -> RoundResult:
    vector = EncodedVector(codec("fp32"), PartLayout(1000))
    vector.encode(0, torch.linspace(-1, 1, 1000))
    report = Report(inner_steps=4, loss=float("nan"), last_round_seconds=(1.0, 0.1))
    members = (Member(5, "a" * 16, 0.1, float("inf"), report, b"note"),)
    return RoundResult(mean=vector, members=members, contributors=(5,), total_weight=0.3, refused={6: "too long"})


def round_on(ranks: WorkerRanks, answer: Callable[[], RoundResult]) -> tuple[FirstRankEngine, RoundResult]:
    engine = FirstRankEngine(Scripted(answer) if ranks.rank == 0 else None, ranks)
    contribution = Contribution(EncodedVector(codec("fp32"), PartLayout(1000)), 1.0, 1.0, "", "")
    return engine, engine.start_round(KEY, contribution, 1.0).wait()


def test_every_rank_has_the_round_and_its_mean_and_the_worker_s_number() -> None:
    expected = result()
    for engine, heard in on_ranks(3, lambda ranks: round_on(ranks, result)):
        assert (engine.worker, engine.workers) == (5, 7)
        assert heard.summary_fields() == expected.summary_fields()
        assert repr(heard.members) == repr(expected.members) == repr(engine.members())
        assert torch.equal(heard.mean.data, expected.mean.data)


@pytest.mark.parametrize(
    "error",
    [
        RoundFailed("late", stopping=True, resync=False),
        RoundFailed("missed"),
        Excluded("banned"),
        EngineError("the sidecar is gone"),
    ],
    ids=lambda error: str(error),
)
def test_what_is_raised_on_the_first_rank_is_raised_on_all(error: DiLoCoError) -> None:
    def fails() -> RoundResult:
        raise error

    def raised(ranks: WorkerRanks) -> BaseException:
        with pytest.raises(DiLoCoError) as caught:
            round_on(ranks, fails)
        return caught.value

    first, *others = on_ranks(3, raised)
    assert first is error
    for other in others:
        assert type(other) is type(error) and str(error) in str(other)
        if isinstance(error, RoundFailed) and isinstance(other, RoundFailed):
            assert (other.stopping, other.resync) == (error.stopping, error.resync)


def test_if_the_first_rank_cannot_join_no_rank_goes_on() -> None:
    def connect() -> Engine:
        raise RendezvousError("no worker answers")

    def raised(ranks: WorkerRanks) -> str:
        with pytest.raises(EngineError) as caught:
            connect_first(connect, ranks)
        return str(caught.value)

    assert all("no worker answers" in said for said in on_ranks(2, raised))


def test_a_state_that_is_fetched_is_told_but_for_its_tensors() -> None:
    def fetched(ranks: WorkerRanks) -> GlobalState | None:
        return FirstRankEngine(Scripted(result) if ranks.rank == 0 else None, ranks).fetch_state()

    expected = Scripted(result).fetch_state()
    assert expected is not None
    for rank, state in enumerate(on_ranks(2, fetched)):
        assert bool(state.tensors) == (rank == 0)
        assert (state.numbers, state.layout_digest, state.plain, state.position, state.note) == (
            *(expected.numbers, expected.layout_digest, expected.plain, expected.position),
            expected.note,
        )
        [(key, mean)] = state.means
        assert key == RoundKey(8, 1) and torch.equal(mean.view(-1), expected.means[0][1].view(-1))


def test_a_state_is_gathered_while_the_first_rank_waits_for_a_round() -> None:
    """A joiner asks in a thread of the engine; the round ends when it has its answer."""
    served: list[GlobalState] = []

    def work(ranks: WorkerRanks) -> int:
        calls: list[int] = []

        def provider() -> GlobalState:
            calls.append(ranks.rank)
            return GlobalState({}, {"sequence": int(sum(ranks.sums(1.0)))}, "")

        def answer() -> RoundResult:
            asker = threading.Thread(target=lambda: served.append(scripted.provider()))  # type: ignore[misc]
            asker.start()
            asker.join(20.0)
            return result()

        scripted = Scripted(answer)
        engine = FirstRankEngine(scripted if ranks.rank == 0 else None, ranks)
        engine.serve_state(provider)
        contribution = Contribution(EncodedVector(codec("fp32"), PartLayout(1000)), 1.0, 1.0, "", "")
        engine.start_round(KEY, contribution, 1.0).wait()
        return len(calls)

    assert on_ranks(2, work) == [1, 1]
    assert [state.numbers for state in served] == [{"sequence": 2}]


def test_a_joiner_that_asks_ranks_which_do_nothing_together_gets_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rank, "STATE_SECONDS", 0.01)

    def work(ranks: WorkerRanks) -> bool:
        engine = FirstRankEngine(scripted if ranks.rank == 0 else None, ranks)
        engine.serve_state(lambda: GlobalState({}, {"sequence": 1}, ""))
        if ranks.rank == 0:
            assert scripted.provider is not None
            with pytest.raises(RoundFailed, match="did not gather"):
                scripted.provider()
        return engine.wanted(4)  # and it is not asked for later

    scripted = Scripted(result)
    assert on_ranks(2, work) == [True, True]


def test_the_first_rank_s_engine_knows_the_next_round_while_the_ranks_do_nothing_together() -> None:
    def work(ranks: WorkerRanks) -> int | None:
        scripted = Scripted(result)
        engine = FirstRankEngine(scripted if ranks.rank == 0 else None, ranks)
        engine.next_round = lambda: 56
        return None if scripted.next_round is None else scripted.next_round()

    assert on_ranks(2, work) == [56, None]
