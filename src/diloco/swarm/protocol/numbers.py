"""Worker numbers. They are labels: a peer's key is its identity, and a worker that returns keeps its number.

The leader gives them. After a network split two workers may have got the same one; of the two the one with the higher
key asks for another (`joining.settle_number`), and is in no plan before it has one. That is no offence.
"""

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.status import MAX_NUMBER


def give_number(members: Members, name: str, wished: int) -> int:
    """The number of this peer, a new one if another peer with a lower key has it too. Raises CallRefused."""
    leader = members.leader()
    if leader != members.me:
        raise CallRefused(f"{leader} leads, not this worker", "leader")
    numbers = {**members.numbers, members.me: members.status.number}
    taken, number = set(numbers.values()), numbers.get(name)
    told = {peer.status.number for peer in members.peers.values() if peer.status.number >= 0}  # as others say
    if number is None:
        number = wished if wished >= 0 and wished not in taken else _next(taken | told)
    elif any(other < name for other, its in numbers.items() if its == number):
        number = _next(taken | told)
    members.numbers[name] = number
    return number


def _next(taken: set[int]) -> int:
    """Above all that are taken; a member that claims the highest number makes none impossible."""
    return max(taken) + 1 if max(taken) < MAX_NUMBER else min(set(range(len(taken) + 1)) - taken)


def clashes(members: Members, name: str) -> bool:
    """Whether another live member has the number of this one, and a lower key."""
    number = members.number_of(name)
    numbers = {peer.name: peer.status.number for peer in members.live()} | {members.me: members.status.number}
    return number >= 0 and any(other < name for other, its in numbers.items() if its == number)
