"""When a worker gives up a round, so that training goes on:

    no majority    most others are in a later round, or have fallen silent
    too few        the leader can make no plan, as too few workers are left (one accuses another of a lie), and another
                   member is in a later round, where all can meet; the leader's word alone is not enough
    missed         an earlier round has ended after this worker gave it up: it fetches the state first

Nothing is lost by that: the next round carries this work (I6).
"""

import logging
from collections.abc import Collection

from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.round import Round
from diloco.swarm.protocol.wire import Malformed

logger = logging.getLogger(__name__)


def check_majority(round_: Round, outcomes: Outcomes) -> None:
    """Without one no round can end."""
    quorum, lost_seconds = outcomes.quorum, outcomes.members.settings.lost_seconds
    if not round_.ended and not quorum.can_end(round_.sequence):
        round_.fail("most other workers are in a later one")
    if quorum.is_here():
        round_.minority_since = None
        return
    round_.minority_since = round_.minority_since or clock.now()
    if clock.now() - round_.minority_since > timing.MINORITY_SHARE * lost_seconds:
        round_.fail("most other workers have fallen silent: no round ends without a majority (swarm.quorum)")


def record_too_few(round_: Round, outcomes: Outcomes, leader: str) -> None:
    """The leader says that too few workers are left in this round."""
    round_.leader = leader
    others = [peer.status for peer in outcomes.members.live() if peer.name != leader]
    if any(status.gave_up(round_.sequence) for status in others):
        round_.fail("too few workers are left in it, and others are in a later one")


async def look_back(round_: Round, outcomes: Outcomes, posted: Collection[int]) -> None:
    """Fail this round if one before it, which is not among the posted ones, has ended with the votes of most."""
    status = outcomes.members.status
    ended = {peer.name: peer.status.ended_round for peer in outcomes.members.live()}
    for peer, sequence in ended.items():
        if round_.ended or not status.ended_round < sequence < round_.sequence or sequence in posted:
            continue
        try:
            agreed = await outcomes.ask(peer, sequence)
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("round %d: %s does not give its outcome: %s", sequence, peer, problem)
            continue
        if agreed is not None and outcomes.quorum.has_decided(agreed):
            status.lose_state()
            round_.fail(f"round {sequence} has ended, which this worker gave up", resync=True)
