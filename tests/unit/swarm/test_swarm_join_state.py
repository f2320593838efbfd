"""What a joiner decides from the peers' answers: it is let in, founds a run, gets a number or gives up."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from diloco.errors import Excluded, RendezvousError
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.protocol.joining import (
    JOIN_TRANSITIONS,
    JoinPhase,
    JoinState,
    giver_of_another_number,
    next_look_seconds,
    number_giver,
)
from diloco.swarm.protocol.membership import Membership, Peer
from diloco.swarm.protocol.status import OwnStatus, Status
from diloco.swarm.settings import Settings

KNOWN = {"a": ["/ip4/1.2.3.4"], "b": ["/ip4/5.6.7.8"]}
SILENT = Unreachable("silent")
LATER = CallRefused("not yet", "busy")
BANNED = CallRefused("banned", "banned")


def joiner(*, founder: bool = False, wished: int = -1) -> JoinState:
    return JoinState(Settings("", "", founder=founder), wished, 0.0)


def members(*numbers: int, own: int = -1, state: bool = True) -> Membership:
    made = Membership("me", Settings("", ""), OwnStatus(own), lambda: 1.0)
    for number in numbers:
        name = f"peer {number}"
        made.peers[name] = Peer(name, b"", ())
        made.hear(made.peers[name], Status(number, has_state=state), hello=True)
    return made


def test_one_member_that_lets_a_worker_in_is_enough() -> None:
    state = joiner()
    state.judge_search(KNOWN, [SILENT, LATER], 1.0)
    assert state.phase is JoinPhase.SEARCHING
    state.judge_search(KNOWN, [SILENT, None], 2.0)
    assert state.phase is JoinPhase.ASKING and state.number is None


def test_only_a_founder_begins_a_run_and_only_if_no_peer_answers() -> None:
    late = timing.SEARCH_SECONDS + 1.0
    founder = joiner(founder=True, wished=3)
    founder.judge_search(KNOWN, [SILENT, SILENT], timing.FOUNDER_SEARCH_SECONDS)
    assert founder.phase is JoinPhase.SEARCHING
    founder.judge_search(KNOWN, [LATER, SILENT], late)  # there is a run
    assert founder.phase is JoinPhase.GIVEN_UP
    founder = joiner(founder=True, wished=3)
    founder.judge_search(KNOWN, [SILENT, SILENT], timing.FOUNDER_SEARCH_SECONDS + 0.1)
    assert founder.phase is JoinPhase.FOUNDED and founder.number == 3
    other = joiner()
    other.judge_search(KNOWN, [SILENT, SILENT], late)
    assert other.phase is JoinPhase.GIVEN_UP and isinstance(other.final_error, RendezvousError)
    assert "/ip4/1.2.3.4, /ip4/5.6.7.8" in str(other.final_error)


def test_a_founder_that_knows_no_peer_does_not_wait() -> None:
    state = joiner(founder=True)
    state.judge_search({}, [], 0.0)
    assert state.phase is JoinPhase.FOUNDED and state.number == 0


@pytest.mark.parametrize(
    ("problems", "excluded"),
    [([BANNED, SILENT], True), ([BANNED, None], False), ([BANNED, BANNED, None], True), ([LATER, LATER], False)],
)
def test_a_worker_is_excluded_only_if_more_turn_it_away_for_good_than_let_it_in(
    problems: list[Exception | None], excluded: bool
) -> None:
    state = joiner()
    state.judge_search(KNOWN, problems, 1.0)
    assert isinstance(state.final_error, Excluded) == excluded
    state = joiner()
    state.judge_search(KNOWN, [None], 1.0)
    state.judge_hellos(problems)
    assert (state.phase is JoinPhase.GIVEN_UP) == excluded


def test_a_worker_without_a_number_after_a_minute_says_why() -> None:
    state = joiner()
    swarm = members(0)
    assert not state.may_ask(swarm, 1.0)  # no member has let it in
    state.judge_search(KNOWN, [None], 1.0)
    assert state.may_ask(swarm, 10.0)
    state.record_no_number(swarm, "peer 0", SILENT)
    assert state.may_ask(swarm, 9.9 + timing.SEARCH_SECONDS)
    assert not state.may_ask(swarm, 10.0 + timing.SEARCH_SECONDS)
    assert "worker 0 (peer 0), which leads it, cannot be reached from here" in str(state.final_error)


def test_a_number_is_asked_of_the_leader_and_of_no_other() -> None:
    assert number_giver(members(2, 1)) == "peer 1"
    assert number_giver(members(2, 1, state=False)) is None
    leading = members(2, own=0)
    leading.status.keep_state()
    assert number_giver(leading) is None


def test_of_two_workers_with_one_number_the_one_with_the_higher_key_asks_for_another() -> None:
    lower_key = members(0, 2, own=2)
    assert lower_key.me < "peer 2" and giver_of_another_number(lower_key) is None
    higher_key = members(0, 2, own=2)
    higher_key.me = "zzz"
    assert giver_of_another_number(higher_key) == "peer 0"


def test_the_pauses_between_looks_grow_until_a_member_is_found() -> None:
    pauses = [timing.LOOK_SECONDS]
    for _ in range(20):
        pauses.append(next_look_seconds(pauses[-1], found=False))
    assert pauses == sorted(pauses) and pauses[-1] == timing.LONGEST_LOOK_SECONDS
    assert next_look_seconds(pauses[-1], found=True) == timing.LOOK_SECONDS


CHANGES: dict[JoinPhase, Callable[[JoinState], object]] = {
    JoinPhase.ASKING: lambda state: state.judge_search(KNOWN, [None], 1.0),
    JoinPhase.JOINED: lambda state: state.take_number(4),
    JoinPhase.FOUNDED: lambda state: state.judge_search({}, [], 0.0),
    JoinPhase.GIVEN_UP: lambda state: state.judge_hellos([BANNED]),
}


@pytest.mark.parametrize(
    ("before", "after"), [(before, after) for before, follow in JOIN_TRANSITIONS.items() for after in follow]
)
def test_every_change_of_the_table_is_one_that_a_joiner_makes(before: JoinPhase, after: JoinPhase) -> None:
    state = joiner(founder=True)
    if before is not JoinPhase.SEARCHING:
        CHANGES[before](state)
    assert state.phase is before
    CHANGES[after](state)
    assert state.phase is after


def test_a_process_is_named_above_an_earlier_one_though_the_clock_was_set_back() -> None:
    earlier = f"{900:020d}-aa"
    status = OwnStatus(process=f"{500:020d}-bb")
    status.start_after(earlier)
    assert status.process == f"{901:020d}-bb"
    later = replace(status)
    later.start_after(f"{7:020d}-cc")
    assert later.process == status.process
