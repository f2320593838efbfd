"""Faults of benchmarks/adversary_real.py: what happens to an honest run while it trains.

Each returns the members that the run must be good for in the end.
"""

import time
from signal import SIGCONT, SIGSTOP

from adversary_run import Member, Swarm

_JOINED_SECONDS = 90.0


class NotAsItMustBe(Exception):
    """Says what has not happened after a fault, though it must."""


def sleep(swarm: Swarm) -> list[Member]:
    """Stop a member's processes for three times `lost_seconds`."""
    sleeper = swarm.members[-1]
    sleeper.away = True
    swarm.wait_for_round(swarm.size.attack_from, swarm.members[0])
    sleeper.signal(SIGSTOP)
    time.sleep(3 * swarm.size.lost_seconds)
    sleeper.signal(SIGCONT)
    return swarm.members[:5]


def twice(swarm: Swarm) -> list[Member]:
    """Start a copy of a member's run folder, which must be refused."""
    swarm.wait_for_round(swarm.size.attack_from, swarm.members[0])
    copy = swarm.resume("copy", swarm.members[-1])
    swarm.wait(lambda: None not in (copy.code, swarm.members[0].code))
    if copy.code == 0 or "identity" not in copy.output:
        raise NotAsItMustBe(f"the copy was not refused: {copy.output[-500:]}")
    return swarm.members[:5]


def founder_gone(swarm: Swarm) -> list[Member]:
    """Kill the founder, and let a new member join at another one's addresses."""
    swarm.wait_for_round(swarm.size.attack_from, swarm.members[0])
    invitation = swarm.invitation(known_by=1)
    swarm.members[0].kill()
    swarm.join("late", invitation)
    return swarm.members[1:]


# Members with machines of their own: they need root


def bad_pair(swarm: Swarm) -> list[Member]:
    """Let the last two members drop each other's packets."""
    swarm.wait_for_round(swarm.size.attack_from - 1, swarm.members[0])
    _cut(swarm, [3], [4])
    return swarm.members[:5]


def slow_line(swarm: Swarm) -> list[Member]:
    """Limit the last member's line to 1 Mbit/s from then on."""
    swarm.wait_for_round(swarm.size.attack_from - 1, swarm.members[0])
    assert swarm.net is not None
    swarm.net.limit("m4", "1mbit")
    return swarm.members[:5]


def cut(swarm: Swarm) -> list[Member]:
    """Cut two members off until a new one has joined on each side, and for three times `lost_seconds` more."""
    swarm.wait_for_round(swarm.size.attack_from - 1, swarm.members[0])
    invitations = [swarm.invitation(known_by=index) for index in (1, 4)]
    _cut(swarm, [0, 1, 2], [3, 4])
    joiners = [swarm.join("joiner-0", invitations[0])]
    _block(swarm, 5, [3, 4])
    joiners.append(swarm.join("joiner-1", invitations[1]))
    _block(swarm, 6, [0, 1, 2, 5])
    for index in (3, 4, 6):
        swarm.members[index].away = True
    try:
        swarm.wait(lambda: all(joiner.number >= 0 for joiner in joiners), _JOINED_SECONDS)
    except TimeoutError:
        raise NotAsItMustBe("a joiner was not taken in on its side of the cut") from None
    time.sleep(3 * swarm.size.lost_seconds)
    assert swarm.net is not None
    for index in range(len(swarm.members)):
        swarm.net.unblock(f"m{index}")
    return swarm.members


def _cut(swarm: Swarm, first_side: list[int], second_side: list[int]) -> None:
    """Drop all packets between these members."""
    for side, other_side in ((first_side, second_side), (second_side, first_side)):
        for member in side:
            _block(swarm, member, other_side)


def _block(swarm: Swarm, member: int, senders: list[int]) -> None:
    """Drop what comes from these members: no connection with them can be made, nor goes on."""
    assert swarm.net is not None
    swarm.net.block(f"m{member}", f"{{ {', '.join(swarm.places[sender] for sender in senders)} }}")
