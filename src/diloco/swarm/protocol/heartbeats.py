"""When a peer is called, when it counts as lost, and what a heartbeat tells it.

    look        every tick at every peer: is it due a heartbeat, silent for too long, to be forgotten? (`look_at`)
    no answer   a live peer is asked once more before it counts as dead; one that is away stays away (`judge_no_answer`)
    beat        the sender's status, and the members that the receiver does not know (`beat_for`)

A silent peer is called again for ever, less and less often, so that a cut network heals by itself. Each decision is a
function of what is known of the peer and of the time; node/heartbeats.py carries them out.
"""

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.protocol.membership import MAX_ADDRESSES, Membership, Peer
from diloco.swarm.protocol.messages import Beat
from diloco.swarm.protocol.refusals import OUT_OF_THE_RUN
from diloco.swarm.settings import Settings

_MAX_SILENT = 256
"""Silent peers that are called for ever."""


@dataclass(frozen=True)
class Look:
    """What to do about a peer now, in this order."""

    lost: bool = False
    """It counts as lost. Its connection is dropped: that may be to a frozen process, while another one has taken that
    one's place."""
    forget: bool = False
    call: bool = False
    """Send it a heartbeat; connect to it first if it is not live."""


def look_at(peer: Peer, me: str, settings: Settings, byte_at: float, now: float) -> Look:
    """`byte_at`: when the last byte of the peer arrived; its beats may wait behind a transfer."""
    if peer.left:
        return Look(forget=now - max(peer.heard_at, peer.lost_at) > timing.FORGET_SECONDS)
    lost = peer.live and now - max(peer.heard_at, byte_at) > settings.lost_seconds
    lost_at = now if lost else peer.lost_at
    if not peer.heard_at and lost_at and now - lost_at > timing.FORGET_SECONDS:
        return Look(lost, forget=True)  # named by others, and never heard
    if peer.live and not lost:
        # The peer with the lower name begins; the other one begins only if it hears nothing.
        due = settings.beat_seconds * (1.0 if me < peer.name else timing.SECOND_CALLER_SHARE)
    elif lost_at:
        redial = min(timing.LONGEST_REDIAL_SECONDS, (now - lost_at) / timing.REDIAL_DIVISOR)
        due = max(settings.lost_seconds, redial)
    else:
        due = 0.0
    return Look(lost, call=now - max(peer.heard_at, peer.asked_at) >= due)


def too_many_silent(peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers that have been silent for longest, and are forgotten, if there are too many."""
    silent = [peer for peer in peers if not peer.live and peer.lost_at]
    return sorted(silent, key=lambda peer: peer.lost_at)[: max(0, len(silent) - _MAX_SILENT)]


class NoAnswer(enum.Enum):
    """What follows from a call to a peer that has failed."""

    REJECTED = enum.auto()
    """The peer lets this worker in no longer."""
    STAYS_AWAY = enum.auto()
    """It was not live before."""
    ASK_AGAIN = enum.auto()
    """A live peer may have died: another call tells."""
    WAIT = enum.auto()
    """Its silence is counted."""


def judge_no_answer(peer: Peer, problem: Exception) -> NoAnswer:
    if isinstance(problem, CallRefused) and problem.code in OUT_OF_THE_RUN:
        return NoAnswer.REJECTED
    if not peer.live:
        return NoAnswer.STAYS_AWAY
    if isinstance(problem, Unreachable) and (problem.gone or problem.broken):
        return NoAnswer.ASK_AGAIN
    return NoAnswer.WAIT


def is_gone(problem: Exception) -> bool:
    """Whether the peer is known to be dead: its machine refuses the connection."""
    return isinstance(problem, Unreachable) and problem.gone


def peers_to_name(members: Membership) -> list[Peer]:
    """Return the peers to name to others: only those that this node has heard itself, since others may be invented."""
    now = members.now()
    return [
        peer
        for peer in members.peers.values()
        if peer.heard_at and not peer.left and (peer.live or now - peer.lost_at < timing.FORGET_SECONDS)
    ]


def beat_for(
    peer: Peer, members: Membership, addresses: Collection[str], revocations_digest: str, ended: bytes
) -> Beat:
    """This worker's heartbeat for a peer, with the live members that the peer does not know, once it has reported
    any. `ended`: how this worker's last round has ended."""
    live = [other for other in peers_to_name(members) if other.live]
    unknown = [
        other for other in live if other is not peer and peer.knows is not None and other.name[-8:] not in peer.knows
    ]
    return Beat(
        status=members.status,
        addresses=tuple(addresses)[:MAX_ADDRESSES],
        known=tuple(sorted(name[-8:] for name in [members.me, *(other.name for other in live)])),
        revocations_digest=revocations_digest,
        ended=ended,
        roster=tuple(other.roster_entry() for other in unknown),
    )


def differs(own_end: bytes, beat: Beat) -> bool:
    """Whether the sender of a beat has ended its last round with another plan than this worker has."""
    return own_end != b"" and beat.ended not in (b"", own_end)
