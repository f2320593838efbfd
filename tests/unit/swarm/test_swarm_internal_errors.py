"""A fault of a worker's own program is told by an event, blames no other worker, and stops no more than it must."""

import asyncio
import errno
from typing import Any

import pytest

from diloco.swarm.audit.transfer import AuditedTransfer
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.leader import LedRound
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.protocol.messages import AskOutcome, OpenMean
from diloco.swarm.protocol.wire import encode
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, values


def faults(worker: MemoryWorker) -> list[Any]:
    return [fields for type_, fields in worker.trainer.events if type_ == "internal_error"]


def test_a_leader_whose_program_fails_says_so_and_the_next_one_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = LedRound._gather

    async def story(swarm: MemorySwarm) -> list[list[Any]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)

        async def fail(led: LedRound) -> None:
            if led._members.me == workers[0].name:
                raise KeyError("seven")
            await gather(led)

        monkeypatch.setattr(LedRound, "_gather", fail)
        await rounds(workers, 1)
        return [faults(worker) for worker in workers]

    assert told(story) == [[{"what": "leading a round", "reason": "KeyError: 'seven'"}], [], []]


def test_a_fault_in_a_transfer_blames_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 2 cannot add up the norm of the means that it gets."""
    squared_norm = AuditedTransfer._squared_norm

    async def story(swarm: MemorySwarm) -> tuple[list[Any], list[list[Any]]]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)

        def fail(audit: AuditedTransfer, mean: memoryview) -> float:
            if audit.me == workers[2].name:
                raise ZeroDivisionError("no norm")
            return squared_norm(audit, mean)

        monkeypatch.setattr(AuditedTransfer, "_squared_norm", fail)
        posts = [worker.post(values(i, 1, 20_000), sequence=1) for i, worker in enumerate(workers)]
        ended = await asyncio.gather(*posts)
        return [outcome.contributors for outcome, _ in ended], [faults(worker) for worker in workers]

    contributors, found = told(story)
    assert contributors == [(0, 1, 2, 3)] * 4, "three have voted, and the fourth fetches the mean"
    assert found == [[], [], [{"what": "following a plan", "reason": "ZeroDivisionError: no norm"}], []]


def test_a_fault_in_an_answer_is_told_once_a_minute_and_the_caller_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise IndexError("seats: none")

    async def story(swarm: MemorySwarm) -> tuple[list[Any], list[str]]:
        asked, caller = await founded(swarm, 2)
        monkeypatch.setattr(Outcomes, "answer", fail)
        monkeypatch.setattr(Outcomes, "serve_mean", fail)
        codes = []
        for _ in range(3):
            with pytest.raises(CallRefused, match="failed at it") as refused:
                await caller.node.outcomes.calls.ask(asked.name, AskOutcome(0))
            codes.append(refused.value.code)
            stream = await caller.node.transport.open_stream(asked.name, 1.0)
            await write_frame(stream, encode(OpenMean(0)), 1.0)
            await asyncio.sleep(1.0)
            stream.close()
        return faults(asked), codes

    found, codes = told(story)
    assert [one["what"] for one in found] == ["answering a call", "serving a stream"] and codes == ["", "", ""]


def test_a_machine_that_has_run_out_of_open_files_says_what_to_do_and_is_back_when_it_has_some() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[Any], tuple[int, ...], tuple[int, ...]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)
        short = workers[2].node.transport
        whole = {name: getattr(short, name) for name in ("addresses", "call", "connect", "open_stream")}

        async def fail(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        for name in whole:
            setattr(short, name, fail)
        await asyncio.sleep(5.0)
        posts = [worker.post(values(i, 1), sequence=1) for i, worker in enumerate(workers[:2])]
        (without, *_) = (outcome.contributors for outcome, _ in await asyncio.gather(*posts))
        for name, method in whole.items():
            setattr(short, name, method)
        await asyncio.sleep(10.0)
        workers[2].node.own.has_state = False
        await workers[2].catch_up()
        posts = [worker.post(values(i, 2), sequence=2) for i, worker in enumerate(workers)]
        (again, *_) = (outcome.contributors for outcome, _ in await asyncio.gather(*posts))
        return faults(workers[2]), without, again

    found, without, again = told(story, patience=0.5)
    assert without == (0, 1) and 2 in again
    assert any("its regular checks" in fault["what"] and "ulimit -n" in fault["reason"] for fault in found)
