"""What one member says of others, and how often it may come and go: neither stops a round nor fills a disk."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol import attendance
from diloco.swarm.protocol.joining import give_number
from diloco.swarm.protocol.membership import DIALS_AT_ONCE, DIALS_PER_SECOND
from diloco.swarm.protocol.messages import Goodbye, RosterEntry
from diloco.swarm.sidecar.process import LogLimit
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, values
from diloco.swarm.trust.invitation import invite

INVENTED = [f"{NAMES[5][:-4]}{index:04d}" for index in range(40)]


def invented(swarm: MemorySwarm, number: int) -> list[RosterEntry]:
    """Members that there are not, each with an invitation of the liar's, this number, and the address of a machine
    that never answers."""
    where = ("/ip4/192.0.2.1/tcp/1",)
    made = [(name, invite(swarm.run_key, [], 4e9, 0.0).credential(name).data()) for name in INVENTED]
    return [RosterEntry(name, credential, where, number) for name, credential in made]


def count_calls(worker: MemoryWorker, calls: Counter[str]) -> None:
    """Of connections to invented members, which stay open until the caller's patience is over."""
    honest = worker.node.transport.connect

    async def connect(peer: str, addresses: list[str], seconds: float) -> None:
        if peer not in INVENTED:
            return await honest(peer, addresses, seconds)
        calls[worker.name] += len(addresses)
        await asyncio.sleep(seconds)
        raise Unreachable("no answer")

    worker.node.transport.connect = connect  # type: ignore[method-assign]


def test_invented_members_with_a_live_ones_number_count_in_no_quorum_and_are_rarely_called() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], Counter[str], float]:
        workers = await founded(swarm, 4)
        await rounds(workers, 2)
        calls = Counter[str]()
        for worker in workers[:3]:
            count_calls(worker, calls)
        for worker in workers[:3]:
            worker.node.members.add_roster(workers[3].name, invented(swarm, 1))
        await asyncio.sleep(2.0)
        counted = [worker.node.outcomes.quorum.counting_members() & set(INVENTED) for worker in workers[:3]]
        started = clock.now()
        await rounds(workers, 3)
        took = clock.now() - started
        await asyncio.sleep(60.0)
        return counted, calls, took

    counted, calls, took = told(story)
    assert counted == [set()] * 3 and took < 10.0
    assert max(calls.values()) <= DIALS_AT_ONCE + 65 * DIALS_PER_SECOND + 1


def test_a_false_address_of_a_lost_member_does_not_keep_it_from_being_found_again() -> None:
    async def story(swarm: MemorySwarm) -> list[str]:
        workers = await founded(swarm, 3)
        lost = workers[2].name
        members = workers[0].node.members
        where = members.peers[lost].addresses
        members.record_lost(members.peers[lost], "silent")
        for index in range(50):
            entry = RosterEntry(lost, members.peers[lost].credential, (f"/ip4/192.0.2.1/tcp/{index}",), 2)
            members.add_roster(workers[1].name, [entry])
        addresses, _ = members.dialled_addresses(members.peers[lost])
        assert addresses[: len(where)] == list(where)
        return addresses[len(where) :]

    assert len(told(story)) <= 8


def test_a_number_that_is_only_said_of_others_is_free_for_the_worker_that_had_it() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, int]:
        workers = await founded(swarm, 2)
        members = workers[0].node.members
        members.add_roster(workers[1].name, invented(swarm, 2))
        return give_number(members, NAMES[7], wished=2), give_number(members, NAMES[8], wished=-1)

    assert told(story) == (2, 3)  # a new worker's is above all that are named


def test_the_record_of_a_member_is_of_its_key_and_not_of_its_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never sends its parts, and says goodbye and hello after every round, is soon left out of most."""
    honest = Transfer.run
    liars: set[str] = set()

    async def run(transfer: Transfer) -> None:
        if transfer._transport.peer in liars:
            await asyncio.sleep(3600.0)
        await honest(transfer)

    monkeypatch.setattr(Transfer, "run", run)

    async def story(swarm: MemorySwarm) -> list[bool]:
        workers = await founded(swarm, 5)
        await rounds(workers, 1)
        liar, good = workers[4], workers[:4]
        liars.add(liar.name)
        in_plan: list[bool] = []
        for _ in range(14):
            sequence = good[0].trainer.sequence
            lie = asyncio.create_task(liar.post(values(4, sequence), sequence=sequence, seconds=600.0))
            await asyncio.sleep(0.1)
            plans: list[Any] = []
            for worker in good[:1]:
                keep_plans(worker, plans)
            await rounds(good, 1)
            in_plan.append(any(plan.entry(liar.name) is not None for plan in plans))
            lie.cancel()
            await asyncio.gather(lie, return_exceptions=True)
            liar.node.participant.rounds.clear()
            liar.node.own.ended_round = sequence
            liar.node.own.next_round = sequence + 1
            for worker in good:
                worker.node.members.record_left(liar.name)
                worker.node.heartbeats._add(liar.name, liar.node.heartbeats.hello())
        return in_plan

    monkeypatch.setattr("diloco.swarm.node.heartbeats._RETURNS_AT_ONCE", 1000.0)
    in_plan = told(story)
    assert in_plan[:3] == [True] * 3 and sum(in_plan[3:]) <= 4


def keep_plans(worker: MemoryWorker, plans: list[Any]) -> None:
    answer = type(worker.node.participant).answer_plan.__get__(worker.node.participant)

    def keep(sender: str, plan: Any) -> Any:
        plans.append(plan)
        return answer(sender, plan)

    worker.node.participant.answer_plan = keep  # type: ignore[method-assign]


def test_a_member_that_always_says_that_it_has_just_fetched_the_state_is_waited_for_six_times() -> None:
    misses = attendance._Misses()
    waited = 0
    for _ in range(40):
        misses.give_a_chance("a")
        waited += misses.has_a_chance("a")
        misses.add("a")
    assert waited <= 2 * attendance.MISSES + 40 / 8 + 1


def test_a_member_that_leaves_and_comes_back_without_end_makes_few_events() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, int]:
        workers = await founded(swarm, 3)
        one, other = workers[0].node, workers[2].node
        events: list[str] = []
        emit = one.members.on_event
        one.members.on_event = lambda type_, fields: (events.append(type_), emit(type_, fields))[1]
        refused = 0
        for _ in range(600):
            await one._answer(other.transport.peer, Goodbye())
            try:
                one.heartbeats.answer_hello(other.transport.peer, other.heartbeats.hello())
            except CallRefused as problem:
                refused += problem.code == "busy"
            await asyncio.sleep(0.1)
        return len(events), refused

    events, refused = told(story)
    assert refused > 500 and events <= 2 * (8 + 2)


def test_the_log_of_the_network_process_has_a_bound_and_says_what_it_left_out() -> None:
    limit = LogLimit(at_once=10, per_second=0.0)
    records = [logging.LogRecord("a", logging.INFO, "", 0, "line %d", (i,), None) for i in range(100)]
    assert sum(limit.filter(record) for record in records) == 10
    limit._bucket.tokens = 1.0
    last = logging.LogRecord("a", logging.INFO, "", 0, "the last of %d", (101,), None)
    assert limit.filter(last) and last.getMessage() == "(90 lines before this one were left out) the last of 101"
