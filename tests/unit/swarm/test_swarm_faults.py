"""Honest faults: sleep, refusals, a run folder used twice. None ends a worker, splits the swarm or changes a mean."""

import asyncio
import shutil
from typing import Any

import pytest

from diloco.errors import Excluded
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node.calls import check_process
from diloco.swarm.protocol import messages
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.simulator.stories import founded, freeze, rounds, sleep, stop, thaw, told, train
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, values
from diloco.swarm.trainer import RoundOutcome


async def missed(worker: MemoryWorker) -> None:
    """As a trainer does with a round that the others have ended: it fails, and the state is fetched."""
    outcome, _ = await worker.post(values(worker.node.number, worker.trainer.sequence))
    assert outcome.resync and not outcome.fatal, outcome
    await worker.catch_up()


@pytest.mark.parametrize("number", [0, 2])
def test_a_laptop_that_slept_until_it_was_forgotten_says_hello_catches_up_and_goes_on(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader, or another worker."""
    monkeypatch.setattr("diloco.swarm.protocol.heartbeats._MAX_SILENT", 0)

    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], tuple[int, ...]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)
        sleeper, others = workers[number], [worker for worker in workers if worker.node.number != number]
        asleep = asyncio.create_task(sleep(swarm, sleeper, 40.0))
        await asyncio.sleep(5.0)
        await rounds(others, 2)
        await asleep
        assert all(sleeper.name not in other.node.members.peers for other in others)
        await missed(sleeper)
        await asyncio.sleep(1.0)
        await rounds(workers, 1)
        return [worker.trainer.means for worker in workers], sleeper.node.members.roster()

    means, roster = told(story)
    assert roster == (0, 1, 2)
    assert len(means[0]) == 4 and means[0] == means[1] == means[2]


@pytest.mark.parametrize("code", ["", "hello", "unknown", "busy", "of-a-later-version"])
def test_a_refusal_that_is_not_final_is_tried_again(code: str) -> None:
    """Also one that this version does not know, and one that says `banned` in its sentence alone."""

    async def story(swarm: MemorySwarm) -> RoundOutcome:
        workers = await founded(swarm, 2)
        leader, times = workers[0].node.leader, 0
        answer = leader.answer_ready

        def refuse_twice(sender: str, ready: messages.Ready) -> Any:
            nonlocal times
            times += sender == workers[1].name
            if sender == workers[1].name and times <= 2:
                raise CallRefused("you are banned: for the moment", code)
            return answer(sender, ready)

        leader.answer_ready = refuse_twice  # type: ignore[method-assign]
        posts = (worker.post(values(worker.node.number)) for worker in workers)
        return [ended for ended, _ in await asyncio.gather(*posts)][1]

    ended = told(story)
    assert (ended.failure, ended.fatal, ended.contributors) == (None, False, (0, 1))


def test_a_joiner_that_is_refused_for_an_unknown_reason_tries_again() -> None:
    async def story(swarm: MemorySwarm) -> int:
        workers = await founded(swarm, 2)
        for worker in workers:
            answer, refused = worker.node.transport.on_call, 0

            async def refuse_twice(peer: str, data: bytes, answer: Any = answer) -> bytes:
                nonlocal refused
                refused += messages.hello_version(data) is not None
                if refused <= 2:
                    raise CallRefused("the cat sits on the keyboard", "cat")
                return await answer(peer, data)

            worker.node.transport.on_call = refuse_twice
        return (await swarm.start()).node.number

    assert told(story) == 2


@pytest.mark.parametrize("first_answers", [True, False])
def test_of_two_processes_with_one_identity_the_second_is_refused_and_the_first_goes_on(first_answers: bool) -> None:
    """A run folder was copied to another machine. Calls to the identity reach the one or the other."""

    async def story(swarm: MemorySwarm) -> list[list[bytes]]:
        workers = list(await founded(swarm, 3))
        await rounds(workers, 1)
        swarm.network.first_answers, first = first_answers, workers[1]
        copy = shutil.copytree(first.node.settings.folder, swarm.folder / f"copy-{first_answers}")
        posts = [asyncio.create_task(worker.post(values(worker.node.number, 1))) for worker in workers[1:]]
        with pytest.raises(Excluded, match="another process with the identity of this worker"):
            await swarm.start(name=first.name, folder=copy)
        for ended, _ in await asyncio.gather(*posts, workers[0].post(values(0, 1))):
            assert ended.failure is None and ended.contributors == (0, 1, 2)
        assert all("member_lost" not in dict(worker.trainer.events) for worker in workers)
        return [worker.trainer.means for worker in workers]

    means = told(story, lost_seconds=2.0, beat_seconds=0.2)
    assert len(means[0]) == 2 and means[0] == means[1] == means[2]


def test_a_worker_that_is_restarted_before_the_others_have_noticed_is_let_in() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, tuple[int, ...]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)
        victim = workers[1]
        swarm.network.cut.add(victim.name)  # dead, and no connection is refused
        await victim.node.members.wait_for_change(0.0)
        for task in victim.node._tasks:
            task.cancel()
        swarm.network.peers.pop(victim.name)
        swarm.network.cut.clear()
        again = await swarm.start(name=victim.name, folder=victim.node.settings.folder)
        await again.catch_up()
        await asyncio.sleep(1.0)
        return again.node.number, workers[0].node.members.roster()

    assert told(story, lost_seconds=2.0, beat_seconds=0.2) == (1, (0, 1, 2))


@pytest.mark.parametrize("first_answers", [True, False])
@pytest.mark.parametrize("number", [0, 1])
def test_a_frozen_worker_whose_copy_has_taken_its_place_ends_when_it_thaws_and_rounds_go_on(
    number: int, first_answers: bool
) -> None:
    """The leader, or another worker, frozen in the middle of a round. Calls to the identity reach the one or the other.

    The thawed one posts, and leads if it led before, as long as it has not heard that it was replaced."""

    async def story(swarm: MemorySwarm) -> tuple[RoundOutcome, list[list[bytes]], list[str]]:
        workers = list(await founded(swarm, 4))
        await rounds(workers, 1)
        frozen, others = workers[number], [worker for worker in workers if worker.node.number != number]
        frozen.node.progress(tokens=5000)
        post = asyncio.create_task(frozen.post(values(number, 1), seconds=3000.0))
        await asyncio.sleep(0.01)
        freeze(frozen)
        swarm.network.first_answers = first_answers
        copied = shutil.copytree(frozen.node.settings.folder, swarm.folder / f"copy-{number}-{first_answers}")
        write_private(copied / invitation_file(), swarm.invitation().text())  # the founder's own names no other worker
        copy = await swarm.start(name=frozen.name, folder=copied, founder=False)
        await copy.catch_up()
        await asyncio.sleep(2.0)
        assert copy.node.number == number
        everyone = [*others, copy]
        until = copy.trainer.sequence + 4
        training = [asyncio.create_task(train(worker, until)) for worker in everyone]
        await asyncio.sleep(0.5)
        thaw(frozen)
        ended, _ = await post
        async with asyncio.timeout(60.0):
            await asyncio.gather(*training)
        last = copy.node.outcomes.recent.get(until - 1)
        assert last is not None and len(last.plan.decision.contributors) == 4
        left = [type_ for worker in others for type_, _ in worker.trainer.events]
        return ended, [worker.trainer.means for worker in everyone], left

    ended, means, events = told(story, patience=0.5)
    assert ended.fatal and "has taken its place" in str(ended.failure) and "work on 5,000 tokens" in str(ended.failure)
    assert all(one == means[0] for one in means)
    assert "member_left" not in events, "the goodbye of the one that was replaced is not that of the other"


def test_the_copy_of_a_worker_that_stays_frozen_is_in_the_next_rounds() -> None:
    """The others' connections are still to the frozen process, until they have lost it."""

    async def story(swarm: MemorySwarm) -> list[int]:
        workers = list(await founded(swarm, 4))
        await rounds(workers, 1)
        frozen, swarm.network.first_answers = workers[3], True
        freeze(frozen)
        copied = shutil.copytree(frozen.node.settings.folder, swarm.folder / "copy-of-the-frozen")
        copy = await swarm.start(name=frozen.name, folder=copied)
        await copy.catch_up()
        everyone, until = [*workers[:3], copy], copy.trainer.sequence + 3
        async with asyncio.timeout(10.0):
            await asyncio.gather(*(train(worker, until) for worker in everyone))
        ended = [copy.node.outcomes.recent.get(sequence) for sequence in range(until - 3, until)]
        return [len(one.plan.decision.contributors) for one in ended if one is not None]

    assert told(story, lost_seconds=2.0, beat_seconds=0.2) == [4, 4, 4]


def test_members_hold_the_process_that_they_admitted_last() -> None:
    async def story(swarm: MemorySwarm) -> list[str]:
        here, peer = (await founded(swarm, 2))[:2]
        known, codes = here.node.members.peers[peer.name], list[str]()
        for process in ("0" * 20, known.status.process, "9" * 20, "9" * 20):
            try:
                check_process(known, process, 0.1)
                codes.append("held")
            except CallRefused as refused:
                codes.append(refused.code)
            await asyncio.sleep(1.0)
        return codes

    assert told(story) == ["replaced", "held", "again", "twice"]


def test_a_restarted_worker_is_the_later_process_although_its_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(swarm: MemorySwarm) -> tuple[str, str]:
        workers = await founded(swarm, 2)
        before = workers[1].node.own.process
        stop(swarm, workers[1])
        await asyncio.sleep(2.0)
        with monkeypatch.context() as patch:
            patch.setattr("time.time_ns", lambda: 5)
            again = await swarm.start(name=workers[1].name, folder=workers[1].node.settings.folder)
        return before, again.node.own.process

    before, after = told(story)
    assert before < after


def test_two_that_joined_on_the_two_sides_of_a_cut_have_two_numbers_after_it_and_are_in_the_rounds() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[int], tuple[int, ...], dict[str, str]]:
        workers = list(await founded(swarm, 4))
        await rounds(workers, 1)
        one, other = {w.name for w in workers[:2]} | {NAMES[10]}, {w.name for w in workers[2:]} | {NAMES[11]}
        swarm.network.sides = [one, other]
        await asyncio.sleep(10.0)
        joiners = [await swarm.start(name=NAMES[10]), await swarm.start(name=NAMES[11])]
        assert joiners[0].node.number == joiners[1].node.number == 4
        for joiner in joiners:
            await joiner.catch_up()
        swarm.network.sides = []
        everyone = [*workers, *joiners]
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(train(worker, 5) for worker in everyone))
        (ended,) = {worker.node.outcomes.recent.get(4).plan.decision.contributors for worker in everyone}
        assert len({b"".join(worker.trainer.means) for worker in everyone}) == 1
        banned = {name: why for worker in everyone for name, why in worker.node.permissions.bans().items()}
        return sorted(joiner.node.number for joiner in joiners), ended, banned

    numbers, contributors, banned = told(story, patience=0.5)
    assert numbers == [4, 5] and contributors == (0, 1, 2, 3, 4, 5) and banned == {}


@pytest.mark.parametrize("text", ["banned: out", "model: another one", "say hello first", "Round 3: no", "a-b: c"])
def test_a_refusal_arrives_as_it_was_sent(text: str) -> None:
    arrived = CallRefused.read(text)
    assert str(arrived) == text and CallRefused.read(str(arrived)).code == arrived.code
    assert arrived.code == {"banned: out": "banned", "model: another one": "model"}.get(text, "")


def test_a_side_without_a_majority_ends_no_round_says_so_and_loses_nothing() -> None:
    async def story(swarm: MemorySwarm) -> tuple[RoundOutcome, list[list[bytes]], list[str]]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        swarm.network.sides = [{worker.name for worker in workers[:1]}, {worker.name for worker in workers[1:]}]
        cut_off = asyncio.create_task(workers[0].post(values(0, 1), seconds=300.0))
        await rounds(workers[1:], 3)
        ended, _ = await cut_off
        await asyncio.sleep(20.0)
        swarm.network.sides = []
        await asyncio.sleep(2.0)
        workers[0].trainer.sequence += 1  # the number of a failed round is spent
        await missed(workers[0])
        await asyncio.sleep(1.0)
        await rounds(workers, 1)
        return ended, [worker.trainer.means for worker in workers], [type_ for type_, _ in workers[0].trainer.events]

    ended, means, events = told(story)
    assert ended.failure is not None and "no round ends without a majority" in ended.failure and not ended.resync
    assert len(means[0]) == 5 and means[0] == means[1] == means[2] == means[3]
    assert "minority" in events and "diverged" not in events


def test_a_joiner_gets_the_state_on_a_side_without_a_majority_whose_rounds_fail() -> None:
    """Failed rounds have numbers too: the state is of a later round than the last that has ended."""

    async def story(swarm: MemorySwarm) -> tuple[list[bytes], list[bytes], int, list[str]]:
        workers = list(await founded(swarm, 5))
        await rounds(workers, 1)
        few = workers[3:]
        swarm.network.sides = [{w.name for w in workers[:3]}, {w.name for w in few} | {NAMES[10]}]
        await asyncio.sleep(5.0)
        for _ in range(2):
            await asyncio.gather(*(worker.post(values(worker.node.number, 1), seconds=300.0) for worker in few))
            for worker in few:
                worker.trainer.sequence += 1
        joiner = await swarm.start(name=NAMES[10])
        async with asyncio.timeout(10.0):
            await joiner.catch_up()
        refused = [kind for kind, _ in joiner.trainer.events if kind == "state_refused"]
        return few[0].trainer.means, joiner.trainer.means, joiner.trainer.sequence, refused

    theirs, mine, sequence, refused = told(story)
    assert mine == theirs and sequence == 3 and refused == []


def test_after_the_minority_minutes_a_smaller_side_goes_on() -> None:
    async def story(swarm: MemorySwarm) -> RoundOutcome:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        swarm.network.sides = [{worker.name for worker in workers[:1]}, {worker.name for worker in workers[1:]}]
        await asyncio.sleep(60.0)
        return (await workers[0].post(values(0, 1), seconds=300.0))[0]

    ended = told(story, minority_seconds=30.0)
    assert (ended.failure, ended.contributors) == (None, (0,))


def test_members_that_are_known_to_be_dead_do_not_count() -> None:
    async def story(swarm: MemorySwarm) -> RoundOutcome:
        workers = await founded(swarm, 5)
        await rounds(workers, 1)
        for worker in workers[1:4]:
            stop(swarm, worker)
        posts = [worker.post(values(worker.node.number, 1), seconds=300.0) for worker in (workers[0], workers[4])]
        return (await asyncio.gather(*posts))[0][0]

    ended = told(story)
    assert (ended.failure, ended.contributors) == (None, (0, 4))


def test_with_any_quorum_each_side_goes_on() -> None:
    async def story(swarm: MemorySwarm) -> RoundOutcome:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        swarm.network.sides = [{worker.name for worker in workers[:1]}, {worker.name for worker in workers[1:]}]
        return (await workers[0].post(values(0, 1), seconds=300.0))[0]

    ended = told(story, quorum="any")
    assert (ended.failure, ended.contributors) == (None, (0,))


def test_two_sides_that_both_went_on_find_each_other_after_any_time_and_one_says_what_is_lost() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], list[dict[str, Any]]]:
        workers = await founded(swarm, 2)
        await rounds(workers, 1)
        swarm.network.sides = [{workers[0].name}, {workers[1].name}]
        await asyncio.sleep(10.0)
        for worker in workers:
            worker.node.progress(tokens=100)
            await rounds([worker], 3)
        await asyncio.sleep(700.0)
        swarm.network.sides = []
        async with asyncio.timeout(400.0):
            while not all(worker.node.members.live() for worker in workers):
                await asyncio.sleep(1.0)
            await asyncio.gather(*(train(worker, 8) for worker in workers))
        events = [fields for worker in workers for type_, fields in worker.trainer.events if type_ == "diverged"]
        return [worker.trainer.means for worker in workers], events

    means, events = told(story, beat_seconds=1.0, lost_seconds=5.0)
    assert means[0] == means[1] and len(events) == 1
    assert events[0]["rounds"] == 3 and events[0]["tokens"] == 100


def test_two_that_began_alone_find_each_other_by_the_invitation() -> None:
    async def story(swarm: MemorySwarm) -> list[int]:
        first = await swarm.start()
        await first.catch_up()
        swarm.network.cut.add(first.name)
        second = await swarm.start(founder=True)  # its invitation names the first one
        await second.catch_up()
        swarm.network.cut.clear()
        async with asyncio.timeout(400.0):
            while not (first.node.members.live() and second.node.members.live()):
                await asyncio.sleep(1.0)
            while first.node.number == second.node.number:
                await asyncio.sleep(0.5)
        return sorted([first.node.number, second.node.number])

    assert told(story) == [0, 1]


@pytest.mark.parametrize("bytes_arrive", [True, False])
def test_a_worker_whose_beats_wait_behind_its_transfer_is_not_lost(
    bytes_arrive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(swarm: MemorySwarm) -> bool:
        workers = await founded(swarm, 2)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            workers[0].node.transport, "heard_at", lambda _: loop.time() if bytes_arrive else 0.0, raising=False
        )
        swarm.network.cut.add(workers[1].name)
        await asyncio.sleep(30.0)
        return workers[0].node.members.is_live(workers[1].name)

    assert told(story) == bytes_arrive
