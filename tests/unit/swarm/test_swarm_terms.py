"""The terms of a round are the run's: a worker that posts first decides nothing for the others."""

import asyncio
from typing import Any

import pytest

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, values
from diloco.swarm.trainer import RoundOutcome
from unit.swarm.test_swarm_rounds import mean_of, told

OTHERS: list[dict[str, Any]] = [{"layout": "another"}, {"fragment": 1}, {"ratio": 1e9}, {"merge": "clipped"}]


@pytest.mark.parametrize("other", OTHERS, ids=["layout", "fragment", "max_norm_ratio", "merge"])
def test_a_worker_that_posts_first_with_other_terms_is_left_out_and_the_others_go_on(other: dict[str, Any]) -> None:
    async def story(
        _: MemorySwarm, workers: list[MemoryWorker]
    ) -> tuple[RoundOutcome, list[tuple[RoundOutcome, bytes]]]:
        odd = asyncio.create_task(workers[3].post(values(3), **other))
        await asyncio.sleep(0.3)
        honest = await asyncio.gather(*(worker.post(values(worker.node.number)) for worker in workers[:3]))
        return (await odd)[0], list(honest)

    odd, honest = told(4, story)
    assert {mean for _, mean in honest} == {mean_of([values(i) for i in range(3)], [1.0] * 3)}
    assert [one.contributors for one, _ in honest] == [(0, 1, 2)] * 3
    assert odd.failure is not None


@pytest.mark.parametrize("other", OTHERS, ids=["layout", "fragment", "max_norm_ratio", "merge"])
def test_a_worker_with_other_terms_that_posts_after_the_leader_is_told_what_differs(other: dict[str, Any]) -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> RoundOutcome:
        first = asyncio.create_task(workers[0].post(values(0)))
        await asyncio.sleep(0.3)
        odd, _ = await workers[1].post(values(1), **other)
        first.cancel()
        return odd

    odd = told(2, story)
    assert odd.fatal and "trains something else than this run: fragment" in str(odd.failure)


def test_a_leader_whose_own_worker_is_away_goes_on_with_the_terms_of_most() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[RoundOutcome]:
        odd = asyncio.create_task(workers[1].post(values(1), ratio=1e9, seconds=20.0))
        await asyncio.sleep(0.3)
        honest = await asyncio.gather(*(worker.post(values(worker.node.number)) for worker in workers[2:]))
        odd.cancel()
        return [one for one, _ in honest]

    honest = told(5, story, patience=0.1)
    assert [(one.contributors, one.failure) for one in honest] == [((2, 3, 4), None)] * 3


def test_a_leader_that_calls_an_honest_worker_a_stranger_does_not_end_it() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> RoundOutcome:
        await asyncio.gather(*(worker.post(values(worker.node.number)) for worker in workers))

        def lie(*_: object) -> Any:
            raise CallRefused("you train something else", "model")

        workers[0].node.leader.answer_ready = lie  # type: ignore[method-assign]
        return (await workers[1].post(values(1, 1), sequence=1, seconds=3.0))[0]

    ended = told(3, story)
    assert ended.failure is not None and not ended.fatal
