"""The first thing that a leader does: ask all members for the state of a round.

An earlier leader may have come far. If a member has ended the round, it has ended. If members have the whole mean of a
plan, it may count for a worker that cannot be asked now: the plan of the highest authority is the one to commit. A
member that has answered obeys no leader of a lower authority in this round from then on, posted or not. With a majority
of answers, of which every committed plan had one too, no two leaders commit different plans.
"""

import logging
from collections.abc import Awaitable, Callable

from msgspec import structs

from diloco.engines.rounds import RoundKey
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node.participant import Participant
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.leading import Inquired, SteppedDown, leader_of_most
from diloco.swarm.protocol.messages import Ended, Inquire, LedBy, Posted, Superseded
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.wire import Malformed, PeerMessage

logger = logging.getLogger(__name__)


async def inquire_in_turn(
    participant: Participant, key: RoundKey, authority: Authority, wait_for_earlier: Callable[[int], Awaitable[bool]]
) -> Inquired:
    """As `inquire`, and when it returns no earlier round is under way. Raises SteppedDown.

    The question travels beside the earlier rounds: a promise holds whenever it was given. It is asked again if there is
    something to commit, which must not end before the earlier rounds, or if these have changed the members that count
    and the answers are no majority of those.
    """
    answers = await inquire(participant, key, authority)
    if not await wait_for_earlier(key.sequence):
        return answers
    if answers.plan is None and participant.outcomes.quorum.is_majority(answers.answered):
        return answers
    later = answers.authority._replace(term=answers.authority.term + 1)
    return await inquire(participant, key, later)


async def inquire(participant: Participant, key: RoundKey, authority: Authority) -> Inquired:
    """The answers of a majority. Raises SteppedDown."""
    members, own = participant.members, participant.rounds.get(key.sequence)
    if own is not None:
        authority = authority._replace(term=max(authority.term, own.authority.term + 1))
    while True:
        peers = [members.me, *(peer.name for peer in members.live())]
        answers = await participant.ask_all(key.sequence, peers, Inquire(key.sequence, authority))
        answers = _step_down_if_most_follow_others(participant, key.sequence, answers)
        seen = await _judge(participant, key.sequence, answers)
        if seen is not None and seen.leader >= authority.leader:
            authority = authority._replace(term=seen.term + 1)
        elif participant.outcomes.quorum.is_majority(answers):
            posted = {peer: one for peer, one in answers.items() if isinstance(one, Posted)}
            checked = {peer: _checked(participant, key.sequence, peer, one) for peer, one in posted.items()}
            return Inquired(authority, checked, frozenset(answers))
        else:
            await members.wait_for_change(timing.POLL_SECONDS)
        if participant.outcomes.has_ended(key.sequence):
            raise SteppedDown("it has ended already")


def _step_down_if_most_follow_others(
    participant: Participant, sequence: int, answers: dict[str, PeerMessage]
) -> dict[str, PeerMessage]:
    """The answers without those of members that follow another leader, and so promise nothing. Raises SteppedDown."""
    followed = {peer: answer.leader if isinstance(answer, LedBy) else None for peer, answer in answers.items()}
    leader = leader_of_most(followed, participant.outcomes.quorum.is_majority)
    if leader is not None:
        if (own := participant.rounds.get(sequence)) is not None:
            own.turn_to(leader)
        raise SteppedDown(f"{leader} leads it")
    return {peer: answer for peer, answer in answers.items() if followed[peer] is None}


async def _judge(participant: Participant, sequence: int, answers: dict[str, PeerMessage]) -> Authority | None:
    """The highest authority that the members had seen before. Raises SteppedDown."""
    seen: list[Authority] = []
    for peer, answer in answers.items():
        if isinstance(answer, Ended):
            if peer != participant.members.me and await _has_ended(participant, sequence, peer):
                raise SteppedDown("it has ended already")
        elif isinstance(answer, Posted | Superseded):
            seen.append(answer.seen)
    return max(seen, default=None)


async def _has_ended(participant: Participant, sequence: int, peer: str) -> bool:
    """Whether a round has ended, as `peer` says; its word alone is not enough."""
    own, outcomes = participant.rounds.get(sequence), participant.outcomes
    if own is not None:
        await outcomes.resolve(own, peer)
        return own.ended or participant.members.most_ended(sequence)
    try:
        agreed = await outcomes.ask(peer, sequence)
    except (Unreachable, CallRefused, Malformed) as problem:
        logger.info("round %d: %s does not give its outcome: %s", sequence, peer, problem)
        agreed = None
    return agreed is not None or participant.members.most_ended(sequence)


def _checked(participant: Participant, sequence: int, peer: str, answer: Posted) -> Posted:
    """Without a vote that is not valid."""
    voted = answer.complete
    try:
        if voted is not None:
            participant.outcomes.notary.check_vote(voted.plan, peer, voted.vote)
            if voted.plan.key.sequence != sequence:
                raise Malformed("a plan of another round")
    except Malformed as problem:
        logger.info("round %d: %s has no valid vote: %s", sequence, peer, problem)
        return structs.replace(answer, complete=None)
    return answer
