"""p2pd's errors, and what they mean for a call to another peer: is it unreachable for now, or known to be dead?"""

from diloco.swarm.network.transport import Unreachable

_BACKOFF = "dial backoff"
_LOST_RELAY = "error opening hop stream to relay"
_NOT_SERVED = "protocols not supported"
_SIGNS_OF_DEATH = ("connection refused", "peer id mismatch", "NO_RESERVATION", "no addresses")
_SIGNS_OF_A_BREAK = ("stream reset", "connection reset")
"""The peer may have died, or dropped the connection while this process was frozen: the next call tells."""


class DaemonError(Exception):
    """p2pd could not do what was asked; the text is p2pd's own."""


class HandlerError(Exception):
    """The other peer's handler failed; the text is what it sent."""


class DaemonGone(Exception):
    """The connection to p2pd has broken."""


def was_never_sent(error: DaemonError) -> bool:
    """The call did not reach the other peer, so that it is safe to send it again."""
    return "failed to dial" in str(error)


def is_not_served(error: DaemonError) -> bool:
    """The other peer runs, but does not answer this protocol: it is of another run, or is still starting."""
    return _NOT_SERVED in str(error)


def is_only_backoff(error: DaemonError) -> bool:
    """p2pd failed to reach that peer a moment ago and does not try again yet."""
    text = str(error)
    return all(_BACKOFF in line for line in text.splitlines()[1:] or [text])


def to_unreachable(peer: str, error: DaemonError, *, gone_before: bool) -> Unreachable:
    """The error in one line. `gone` only if every address that p2pd tried says that no peer is there.

    `gone_before`: what the last attempt said, which holds if p2pd did not try this time.
    """
    if is_not_served(error):
        return Unreachable(f"{peer} is there but takes no part in this run, or not yet")
    if is_only_backoff(error):
        return Unreachable(f"{peer} could not be reached", gone=gone_before)
    text = str(error)
    lines = [line.strip(" *") for line in text.splitlines()]
    dials = [line for line in lines[1:] if line and _BACKOFF not in line]
    gone = _LOST_RELAY not in text and all(any(sign in line for sign in _SIGNS_OF_DEATH) for line in dials or lines)
    reasons = "; ".join(dict.fromkeys(line.rpartition("] ")[2] for line in dials)) or lines[0]
    broken = any(sign in text for sign in _SIGNS_OF_A_BREAK)
    return Unreachable(f"{peer} cannot be reached: {reasons[:300]}", gone=gone, broken=broken)
