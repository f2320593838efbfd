"""What one member can make the others wait, remember or send: each bound holds, and honest work goes on beside it."""

import asyncio
import socket
from typing import Any

import pytest
from msgspec import structs

from diloco.swarm.network.p2pd import streams
from diloco.swarm.network.p2pd.streams import SocketStream
from diloco.swarm.network.p2pd.transport import IncomingRequests
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.calls import addressed
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.node import CALLS_AT_ONCE, CALLS_PER_SECOND
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.attendance import Attendance
from diloco.swarm.protocol.certificate import Agreed, Certificate
from diloco.swarm.protocol.leading import LedRoundState
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.troubles import Dropped
from diloco.swarm.protocol.wire import encode
from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import RoundOutcome


async def all_post(workers: list[MemoryWorker], sequence: int) -> list[RoundOutcome]:
    posts = (worker.post(values(worker.node.number, sequence), sequence=sequence) for worker in workers)
    return [ended for ended, _ in await asyncio.gather(*posts)]


# Terms and leaders


def test_no_member_can_take_so_high_a_term_that_the_others_cannot_lead() -> None:
    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 4)
        liar = workers[3]

        async def shout() -> None:
            for worker in workers[:3]:
                for term in (1 << 53, 5_000):
                    request = messages.Inquire(0, Authority(term, -3))
                    try:
                        answer: object = await liar.node.participant.calls.ask(worker.name, request)
                    except CallRefused as refused:
                        answer = refused
                    assert isinstance(answer, messages.LedBy) or getattr(answer, "code", "") == "term"

        await shout()
        posts = asyncio.create_task(all_post(workers[:3], 0))
        await asyncio.sleep(0.05)
        await shout()
        return await posts

    assert [one.contributors for one in told(story, patience=0.1)] == [(0, 1, 2)] * 3


def test_the_authority_of_another_worker_is_not_promised_anything_before_the_post_either() -> None:
    async def story(swarm: MemorySwarm) -> None:
        workers = await founded(swarm, 3)
        with pytest.raises(CallRefused, match="sent by another worker"):
            await workers[2].node.participant.calls.ask(workers[1].name, messages.Inquire(0, Authority(1, 0)))

    told(story)


def test_a_member_that_wants_to_lead_again_and_again_does_not_stop_the_leader() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], float]:
        workers = await founded(swarm, 4)
        liar, over = workers[3], asyncio.Event()

        async def usurp() -> None:
            term = 1
            while not over.is_set():
                for worker in workers[:3]:
                    try:
                        answer = await liar.node.participant.calls.ask(
                            worker.name, messages.Inquire(0, Authority(term, -3))
                        )
                    except (CallRefused, Unreachable):
                        continue
                    if isinstance(answer, messages.Superseded | messages.Posted):
                        term = max(term, answer.seen.term + 1)
                await asyncio.sleep(0.02)

        task, started = asyncio.create_task(usurp()), clock.now()
        ended = await all_post(workers[:3], 0)
        over.set()
        await task
        return ended, clock.now() - started

    ended, seconds = told(story, patience=0.1)
    assert [one.contributors for one in ended] == [(0, 1, 2)] * 3 and seconds < 10


@pytest.mark.parametrize(("posts", "most_seconds"), [(False, 15.0), (True, 2.0)])
def test_a_leader_that_never_makes_a_plan_is_passed_over_and_the_next_one_leads(
    posts: bool, most_seconds: float
) -> None:
    """When all have posted it has nothing to wait for, and the others wait for it twice `lost_seconds`."""

    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], float]:
        workers = await founded(swarm, 4)

        def wait_for_ever(*_: object) -> Any:
            return messages.Waiting()

        workers[0].node.leader.answer_ready = wait_for_ever  # type: ignore[method-assign]
        started = clock.now()
        return await all_post(workers[not posts :], 0), clock.now() - started

    ended, seconds = told(story, patience=0.1)
    number = 4 if posts else 3
    assert [one.contributors for one in ended] == [(0, 1, 2, 3)[-number:]] * number and seconds < most_seconds


def test_a_member_that_denies_that_it_leads_is_passed_over_and_the_next_one_leads() -> None:
    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 4)

        def deny(*_: object) -> Any:
            return messages.NotLeader()

        workers[0].node.leader.answer_ready = deny  # type: ignore[assignment, method-assign]
        return await all_post(workers, 0)

    assert [one.contributors for one in told(story, patience=0.1)] == [(0, 1, 2, 3)] * 4


def test_a_leader_that_makes_one_plan_after_another_is_passed_over_in_the_same_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each plan begins anew what the others wait for."""

    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 4)
        judge = LedRoundState.judge_attempt

        def try_again(led: LedRoundState, *given: Any) -> Any:
            if led.authority.minus_number != 0:
                return judge(led, *given)
            return Dropped({}) if given[-1] > workers[0].began + 1.0 else None  # type: ignore[attr-defined]

        make_plan = LedRoundState.make_plan

        def begin(led: LedRoundState) -> Any:
            workers[0].began = clock.now()  # type: ignore[attr-defined]
            return make_plan(led)

        monkeypatch.setattr(LedRoundState, "judge_attempt", try_again)
        monkeypatch.setattr(LedRoundState, "make_plan", begin)
        posts = (worker.post(values(worker.node.number), seconds=200.0) for worker in workers)
        return [ended for ended, _ in await asyncio.gather(*posts)]

    assert [one.contributors for one in told(story, patience=0.1)] == [(0, 1, 2, 3)] * 4


def test_a_leader_that_leaves_a_member_out_of_all_rounds_is_passed_over_and_the_member_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[bool], list[set[str]]]:
        workers = await founded(swarm, 4)
        victim = workers[2]
        fit = LedRoundState._is_fit

        def leave_out(led: LedRoundState, peer: str) -> bool:
            return fit(led, peer) and not (led._members.me == workers[0].name and peer == victim.name)

        monkeypatch.setattr(LedRoundState, "_is_fit", leave_out)
        run = Transfer.run

        async def run_for_a_beat(transfer: Transfer) -> None:
            await asyncio.sleep(0.3)
            await run(transfer)

        monkeypatch.setattr(Transfer, "run", run_for_a_beat)
        seen = []
        for sequence in range(40):
            posts = (worker.post(values(worker.node.number, sequence), sequence=sequence) for worker in workers)
            ended = [one for one, _ in await asyncio.gather(*posts)]
            seen.append(any(2 in one.contributors for one in ended if one.failure is None))
            for worker in workers:  # as if it had fetched the state
                worker.node.own.has_state, worker.node.own.ended_round = True, sequence
        return seen, [{kind for kind, _ in worker.trainer.events} for worker in workers]

    seen, events = told(story, patience=0.1)
    assert not any(seen[:32]) and all(seen[34:])
    assert all("leader_passed_over" in events[number] for number in (1, 3))


def test_a_member_that_a_plan_leaves_out_does_not_take_the_round_from_its_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no plan, and takes the leader for one that makes none."""
    run = Transfer.run

    async def slowly(transfer: Transfer) -> None:
        await asyncio.sleep(4.0)
        await run(transfer)

    async def story(swarm: MemorySwarm) -> list[tuple[RoundOutcome, int]]:
        workers = await founded(swarm, 4)
        await all_post(workers, 0)
        fit = LedRoundState._is_fit
        monkeypatch.setattr(LedRoundState, "_is_fit", lambda led, peer: fit(led, peer) and peer != workers[1].name)
        monkeypatch.setattr(Transfer, "run", slowly)
        ended = await all_post(workers, 1)
        kept = [worker.node.outcomes.recent.get(1) for worker in workers]
        return [(one, end.plan.authority.term) for one, end in zip(ended, kept, strict=True) if end is not None]

    ended = told(story, patience=0.1)
    assert len(ended) >= 3
    assert all((one.contributors, term) == ((0, 2, 3), 1) for one, term in ended if one.failure is None)


def test_a_leader_is_not_blamed_for_a_round_that_waits_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Transfer.run

    async def slowly(self: Transfer) -> None:
        await asyncio.sleep(5.0 if self.plan.key.sequence == 0 else 0.0)
        await run(self)

    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], set[str]]:
        workers = await founded(swarm, 3)
        ended = await asyncio.gather(all_post(workers, 0), all_post(workers, 1))
        return [one for some in ended for one in some], {kind for w in workers for kind, _ in w.trainer.events}

    monkeypatch.setattr(Transfer, "run", slowly)
    ended, events = told(story, patience=0.1)
    assert {one.failure for one in ended} == {None} and "leader_passed_over" not in events


# Members that never do their part


def ended(numbers: list[int], sequence: int) -> Agreed:
    """A round of these workers, all of which have voted."""
    made = plan(numbers, sequence)
    return Agreed(made, Certificate(0, (), {entry.peer: b"" for entry in made.entries}))


@pytest.mark.parametrize("silent", [1, 3])
def test_a_member_that_never_votes_holds_no_round_up_for_long_and_is_left_out_after_three(silent: int) -> None:
    """It posts, sends its parts and fetches the means; the same member leads on."""

    async def story(swarm: MemorySwarm) -> tuple[list[tuple[float, tuple[int, ...]]], list[str]]:
        workers = await founded(swarm, 4)
        await all_post(workers, 0)
        calls = workers[silent].node.participant.calls
        honest, found = calls.ask, list[tuple[float, tuple[int, ...]]]()

        async def ask(peer: str, request: Any) -> Any:
            return messages.Done() if isinstance(request, messages.Complete) else await honest(peer, request)

        calls.ask = ask  # type: ignore[method-assign]
        others = [worker for number, worker in enumerate(workers) if number != silent]
        for sequence in range(1, 9):
            started = clock.now()
            posts = [asyncio.create_task(all_post([worker], sequence)) for worker in workers]
            outcomes = [(await posts[worker.node.number])[0] for worker in others]
            found.append((clock.now() - started, outcomes[0].contributors))
            assert {one.failure for one in outcomes} == {None}
            await asyncio.gather(*posts)
            workers[silent].node.own.has_state = True
        return found, [name for name, _ in workers[0].trainer.events]

    found, events = told(story)
    assert "leader_passed_over" not in events
    assert all(seconds < 3.0 for seconds, _ in found), found
    assert [silent in contributors for _, contributors in found[:4]] == [True, True, True, False]


def test_a_member_that_never_posts_is_waited_for_in_three_rounds_and_then_now_and_then() -> None:
    async def story(swarm: MemorySwarm) -> list[float]:
        workers = await founded(swarm, 4)
        workers[3].node._own_checks.run = lambda: None  # type: ignore[method-assign]  # it says that it has the state
        took = []
        for sequence in range(16):
            started = clock.now()
            assert {one.failure for one in await all_post(workers[:3], sequence)} == {None}
            took.append(clock.now() - started)
            await asyncio.sleep(1.0)
        return took

    took = told(story, patience=0.5)
    waited = [sequence for sequence, seconds in enumerate(took) if seconds > 0.3]
    assert waited[:3] == [0, 1, 2] and len(waited) <= 7


def test_a_member_that_was_passed_over_gets_a_chance_in_every_eighth_round_and_is_back_with_the_first() -> None:
    attendance, chances = Attendance(), []
    for sequence in range(40):
        chances.append(attendance.expects(NAMES[2]))
        attendance.record(ended([0, 1], sequence), NAMES[:3])
    assert chances[:3] == [True] * 3 and sum(chances[-8:]) == 1
    assert all(attendance.expects(name) for name in NAMES[:2])
    attendance.record(ended([0, 1, 2], 40), NAMES[:3])
    assert attendance.expects(NAMES[2])


def test_a_member_that_posts_and_never_takes_part_is_in_fewer_and_fewer_plans() -> None:
    attendance, taken = Attendance(), []
    for sequence in range(24):
        if attendance.takes(NAMES[2]):
            taken.append(sequence)
            attendance.record_trouble(NAMES[2])
        else:
            attendance.record_passed_over(NAMES[2])
    assert taken[:3] == [0, 1, 2] and len(taken) <= 7
    attendance.record(ended([0, 1, 2], 24), NAMES[:3])
    assert attendance.takes(NAMES[2])


# Bytes, calls and numbers


def test_a_state_that_is_larger_than_the_runs_is_refused_before_it_is_read() -> None:
    async def story(swarm: MemorySwarm) -> None:
        workers = await founded(swarm, 2)
        await all_post(workers, 0)

        async def offer(stream: Stream) -> None:
            head = messages.StateHead({"sequence": 1}, "same", b"", 1 << 40, bytes(32))
            await write_frame(stream, encode(head), 1.0)
            await asyncio.sleep(3600.0)

        workers[0].node.states.serve = offer  # type: ignore[method-assign]
        joiner = await swarm.start()
        async with asyncio.timeout(30.0):
            fetched = await joiner.node.fetch_state(most_bytes=1 << 24)
        assert fetched is not None and fetched.sequence == 1

    told(story)


def test_a_byte_now_and_then_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        here, there = socket.socketpair()
        here.setblocking(False)
        stream = SocketStream("peer", here, lambda: None)

        async def drip() -> None:
            for _ in range(1000):
                there.send(b"x")
                await asyncio.sleep(0.01)

        task = asyncio.create_task(drip())
        try:
            with pytest.raises(Unreachable, match="no progress"):
                await stream.read(1 << 16, 0.1)
            monkeypatch.setattr(streams, "LEAST_RATE", 10.0)
            await stream.read(20, 0.1)  # it arrives at a hundred bytes a second
        finally:
            task.cancel()
            stream.close()
            there.close()

    virtual_clock.run(story())


async def call_without_end(incoming: IncomingRequests, peer: str, request: bytes, calls: int) -> int:
    """The peer calls again at every answer; how many calls are refused."""
    refused = 0
    for _ in range(calls):
        try:
            await incoming._answer(peer, request)
        except CallRefused as reason:
            refused += reason.code == "busy"
    return refused


def receiving(worker: MemoryWorker) -> IncomingRequests:
    """A worker's calls, with the limits of a network."""
    incoming = IncomingRequests()
    incoming.on_call = worker.node._on_call
    return incoming


def test_a_flood_of_calls_is_refused_and_the_others_are_answered() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, RoundOutcome]:
        workers = await founded(swarm, 3)
        request = addressed(workers[2].node.members, workers[0].name, messages.AskOutcome(0))
        incoming, count = receiving(workers[0]), int(2 * CALLS_AT_ONCE)
        calls = [call_without_end(incoming, workers[2].name, request, 1) for _ in range(count)]
        refused = sum(await asyncio.gather(*calls))
        ended = await all_post(workers[:2], 0)
        return refused, ended[0]

    refused, ended = told(story, patience=0.1)
    assert refused >= CALLS_AT_ONCE / 2 and ended.failure is None


def test_a_peer_that_calls_at_every_answer_waits_for_the_refusals() -> None:
    async def story(swarm: MemorySwarm) -> float:
        workers = await founded(swarm, 3)
        request = addressed(workers[2].node.members, workers[0].name, messages.AskOutcome(0))
        incoming, began = receiving(workers[0]), clock.now()
        await asyncio.gather(*[call_without_end(incoming, workers[2].name, request, 200) for _ in range(20)])
        return clock.now() - began

    assert told(story, patience=0.1) >= (20 * 200 - CALLS_AT_ONCE) / (CALLS_PER_SECOND + 20)


def test_strangers_that_wait_for_their_refusals_leave_the_members_their_places() -> None:
    async def story(swarm: MemorySwarm) -> int:
        workers = await founded(swarm, 2)
        request = addressed(workers[1].node.members, workers[0].name, messages.AskOutcome(0))
        incoming, strangers = receiving(workers[0]), [f"stranger {index}" for index in range(16)]
        floods = [call_without_end(incoming, name, b"x", 50) for name in strangers for _ in range(40)]
        flooding = asyncio.gather(*floods)
        await asyncio.sleep(0.5)
        refused = await call_without_end(incoming, workers[1].name, request, 20)
        await flooding
        return refused

    assert told(story, patience=0.1) == 0


def test_a_member_with_a_number_cannot_take_that_of_another() -> None:
    async def story(swarm: MemorySwarm) -> list[list[int]]:
        workers = await founded(swarm, 3)
        for worker in workers[:2]:
            peer = worker.node.members.peers[workers[2].name]
            for number in (0, 1):
                worker.node.members.record_heard(peer, structs.replace(peer.status, number=number))
        return [[worker.node.members.number_of(other.name) for other in workers] for worker in workers[:2]]

    assert told(story) == [[0, 1, 2], [0, 1, 2]]


def test_a_worker_whose_header_is_refused_asks_less_and_less_often() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[float], RoundOutcome]:
        workers = await founded(swarm, 2)
        leader, asked, end = workers[0].node.leader, list[float](), clock.now() + 60.0
        honest = leader.answer_ready

        def refuse(sender: str, ready: messages.Ready) -> Any:
            if sender == workers[1].name and clock.now() < end:
                asked.append(clock.now())
                raise CallRefused("not now", "some-code")
            return honest(sender, ready)

        leader.answer_ready = refuse  # type: ignore[method-assign]
        ended = await asyncio.gather(*(worker.post(values(i), seconds=200.0) for i, worker in enumerate(workers)))
        return asked, ended[1][0]

    asked, ended = told(story)
    assert len(asked) <= 20 and ended.failure is None and ended.contributors == (0, 1)
