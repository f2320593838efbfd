"""The tables of docs/protocol.md are made from the code, and the code does what they say."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diloco.engines.rounds import RoundKey
from diloco.swarm.node.node import Node
from diloco.swarm.protocol import table
from diloco.swarm.protocol.certificate import Certificate, Vote
from diloco.swarm.protocol.joining import JOIN_MEANING, JOIN_TRANSITIONS, JoinPhase
from diloco.swarm.protocol.membership import PEER_MEANING, PEER_TRANSITIONS, Peer, PeerPhase
from diloco.swarm.protocol.messages import ANSWERS
from diloco.swarm.protocol.round import MEANING, TRANSITIONS, RoundPhase, RoundState
from diloco.swarm.protocol.status import Status
from diloco.swarm.protocol.wire import PeerMessage
from diloco.swarm.simulator import schedules
from diloco.swarm.simulator.workers import NAMES, plan
from diloco.swarm.trainer import RoundOutcome

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_the_page_has_the_tables_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert table.insert(text) == text, "python -m diloco.swarm.protocol.table makes them anew"


def test_every_phase_has_its_row() -> None:
    assert set(MEANING) == set(TRANSITIONS) == set(RoundPhase)
    assert set(PEER_MEANING) == set(PEER_TRANSITIONS) == set(PeerPhase)
    assert set(JOIN_MEANING) == set(JOIN_TRANSITIONS) == set(JoinPhase)


def posted() -> RoundState:
    return RoundState(None, 0, started=1.0)  # type: ignore[arg-type]  # no phase depends on what was posted


def waiting() -> RoundState:
    state = posted()
    state.record_accepted(NAMES[0])
    return state


def planned() -> RoundState:
    state = posted()
    state.follow(plan([0, 1, 2]), now=2.0)
    return state


def voted() -> RoundState:
    state = planned()
    state.vote_for(Vote(0, (), bytes(64)))
    return state


def end(state: RoundState) -> None:
    state.certify(Certificate(0, (), {}))
    state.end(RoundOutcome(RoundKey(0, 0)))


STATES = {"posted": posted, "waiting": waiting, "planned": planned, "voted": voted}
CHANGES: dict[str, Callable[[RoundState], object]] = {
    "posted": lambda state: state.turn_to(None),
    "waiting": lambda state: state.record_accepted(NAMES[1]),
    "planned": lambda state: state.follow(plan([0, 1]), now=3.0),
    "voted": lambda state: state.vote_for(Vote(0, (), bytes(64))),
    "ended": end,
    "given up": lambda state: state.end(RoundOutcome(RoundKey(0, 0), failure="no majority")),
}


@pytest.mark.parametrize(
    ("before", "after"), [(before.value, after.value) for before, follow in TRANSITIONS.items() for after in follow]
)
def test_every_change_of_the_table_is_one_that_a_round_makes(before: str, after: str) -> None:
    state = STATES[before]()
    assert state.phase.value == before
    CHANGES[after](state)
    assert state.phase.value == after


PEER_STEPS: dict[str, Callable[[Peer], object]] = {
    "live": lambda peer: peer.hear(Status(0), 1.0, hello=True),
    "silent": lambda peer: peer.lose(2.0, gone=False),
    "dead": lambda peer: peer.lose(2.0, gone=True) if peer.live else peer.stay_away(2.0, gone=True),
    "refusing": lambda peer: peer.reject(2.0),
    "left": lambda peer: peer.leave(2.0),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [(before.value, after.value) for before, follow in PEER_TRANSITIONS.items() for after in follow],
)
def test_every_change_of_the_table_is_one_that_a_peer_makes(before: str, after: str) -> None:
    peer = Peer(NAMES[0], b"", ())
    assert peer.phase is PeerPhase.NAMED
    if before != "named":
        for step in ("live", before):
            PEER_STEPS[step](peer)
    assert peer.phase.value == before
    PEER_STEPS[after](peer)
    assert peer.phase.value == after


def test_a_lost_leader_takes_no_plan_and_no_vote_back() -> None:
    for make in (planned, voted):
        state = make()
        phase = state.phase
        state.turn_to(None)
        assert state.phase is phase


def test_rounds_go_from_phase_to_phase_and_messages_are_answered_as_the_tables_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In schedules with lost, doubled and slow calls, splits and crashes, one of them with two that lie."""
    seen: set[tuple[RoundPhase, RoundPhase]] = set()
    peers: set[tuple[PeerPhase, PeerPhase]] = set()
    answered: defaultdict[type[PeerMessage], set[type[PeerMessage]]] = defaultdict(set)
    honest = Node._answer

    def set_attribute(state: RoundState, name: str, value: Any) -> None:
        before = state.phase
        object.__setattr__(state, name, value)
        if state.phase is not before:
            seen.add((before, state.phase))

    def changing(name: str) -> Callable[..., Any]:
        change = getattr(Peer, name)

        def changed(peer: Peer, *given: Any, **named: Any) -> Any:
            before = peer.phase
            told = change(peer, *given, **named)
            if peer.phase is not before:
                peers.add((before, peer.phase))
            return told

        return changed

    async def answer(node: Node, peer: str, request: PeerMessage) -> PeerMessage:
        told = await honest(node, peer, request)
        answered[type(request)].add(type(told))
        return told

    monkeypatch.setattr(RoundState, "__setattr__", set_attribute, raising=False)
    monkeypatch.setattr(Node, "_answer", answer)
    for name in ("hear", "lose", "stay_away", "reject", "leave"):
        monkeypatch.setattr(Peer, name, changing(name))
    for seed, lies in ((24, 0), (213, 0), (14, 2)):
        assert schedules.run(seed, lies=schedules.lies_of(seed, lies) if lies else ()).problems() == []
    assert seen <= {(before, after) for before, follow in TRANSITIONS.items() for after in follow}
    usual = [RoundPhase.POSTED, RoundPhase.WAITING, RoundPhase.PLANNED, RoundPhase.VOTED, RoundPhase.ENDED]
    assert {*pairwise(usual), (RoundPhase.WAITING, RoundPhase.GIVEN_UP)} <= seen
    assert peers <= {(before, after) for before, follow in PEER_TRANSITIONS.items() for after in follow}
    assert {(PeerPhase.NAMED, PeerPhase.LIVE), (PeerPhase.LIVE, PeerPhase.SILENT)} <= peers
    others = {request: answers - {*ANSWERS[request]} for request, answers in answered.items()}
    assert not any(others.values()), others
