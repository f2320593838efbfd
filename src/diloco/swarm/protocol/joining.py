"""How a worker gets into a swarm: when it is let in, whether it begins a run, from whom it asks a number.

    search    it says hello to all peers that it knows, again and again, until one lets it in (`judge_search`). If none
              answers, a founder begins a run, and any other worker gives up
    number    the member that lets it in names the others. It asks the leader for a number (`number_giver`), until it
              has one: the members agree within some beats on which one leads (`may_ask`)
    clash     two workers got one number on the two sides of a split: the one with the higher key asks the leader for
              another (`giver_of_another_number`). The leader gives it (`give_number`)
    look      peers that are no known members are called for ever, less and less often (`next_look_seconds`)

Each decision is a function of the state here, of what the peers answer and of the time; node/joining.py carries them
out.
"""

import enum
from collections.abc import Mapping, Sequence

from diloco.errors import EngineError, Excluded, RendezvousError
from diloco.own_command import command
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.protocol.membership import Membership, clashes
from diloco.swarm.protocol.refusals import NOT_ADMITTED
from diloco.swarm.protocol.status import MAX_NUMBER
from diloco.swarm.settings import Settings


class JoinPhase(enum.Enum):
    SEARCHING = "searching"
    ASKING = "asking"
    JOINED = "joined"
    FOUNDED = "founded"
    GIVEN_UP = "given up"


JOIN_MEANING: dict[JoinPhase, str] = {
    JoinPhase.SEARCHING: "it says hello to the peers of its invitation and to all that this machine has met",
    JoinPhase.ASKING: "a member has let it in; it asks the leader for a number",
    JoinPhase.JOINED: "it has a number, and fetches the state",
    JoinPhase.FOUNDED: "it has begun a run: its state is the run's",
    JoinPhase.GIVEN_UP: "the worker ends with an error that says why",
}

JOIN_TRANSITIONS: dict[JoinPhase, dict[JoinPhase, str]] = {
    JoinPhase.SEARCHING: {
        JoinPhase.ASKING: "Hello of a member",
        JoinPhase.FOUNDED: "no peer answers for some seconds, or none is known, and it is the founder",
        JoinPhase.GIVEN_UP: "no peer answers for a minute; or more turn it away for good than let it in",
    },
    JoinPhase.ASKING: {
        JoinPhase.JOINED: "Number",
        JoinPhase.GIVEN_UP: "no number for a minute; or more turn it away for good than let it in",
    },
    JoinPhase.JOINED: {},
    JoinPhase.FOUNDED: {},
    JoinPhase.GIVEN_UP: {},
}
"""Phase -> the phases that may follow, and what takes the joiner there."""


class JoinState:
    def __init__(self, settings: Settings, wished_number: int, now: float) -> None:
        """`wished_number`: the one that this worker had when it was last here; −1: none."""
        self.wished_number = wished_number
        self._founder = settings.founder
        self._search_end = now + (timing.FOUNDER_SEARCH_SECONDS if self._founder else timing.SEARCH_SECONDS)
        admission_seconds = max(timing.SEARCH_SECONDS, timing.ADMISSION_SHARE * settings.lost_seconds)
        self._admission_end = now + admission_seconds
        """Until then members that answer, and do not let this worker in yet, are asked again."""
        self._asking_end: float | None = None
        self._no_number = "no worker leads it: none that is known has the state of the run"
        """Why this worker has no number yet."""
        self.admitted = False
        """A member has let this worker in."""
        self.number: int | None = None
        self.final_error: EngineError | None = None
        """Why this worker gives up."""

    @property
    def phase(self) -> JoinPhase:
        if self.final_error is not None:
            return JoinPhase.GIVEN_UP
        if self.admitted:
            return JoinPhase.ASKING if self.number is None else JoinPhase.JOINED
        return JoinPhase.SEARCHING if self.number is None else JoinPhase.FOUNDED

    # Search

    def judge_search(
        self, called: Mapping[str, Sequence[str]], problems: Sequence[Exception | None], now: float
    ) -> None:
        """All known peers have been called, at these addresses. `problems`: why each has not let this worker in; None
        for one that has."""
        self.judge_hellos(problems)
        if self.final_error is not None:
            return
        refusals = [problem for problem in problems if isinstance(problem, CallRefused)]
        if any(problem is None for problem in problems):
            self.admitted = True
        elif refusals:
            if now > self._admission_end:
                self.final_error = RendezvousError(
                    f"the swarm does not admit this worker now: {refusals[0]}; try again later"
                )
        elif self._founder and (not called or now > self._search_end):
            self.number = max(self.wished_number, 0)
        elif now > self._search_end:
            tried = ", ".join(address for addresses in called.values() for address in addresses)
            self.final_error = RendezvousError(
                f"no worker of this run answered at {tried or 'any address (none is known)'} within "
                f"{timing.SEARCH_SECONDS:g} s: is one running there, and its port open? Ask for a fresh invitation "
                f"({command('invite', 'RUN')}), and see {command('doctor', '-')}"
            )

    def judge_hellos(self, problems: Sequence[Exception | None]) -> None:
        """This worker gives up if more members turn it away for good than let it in: a new member knows no old bans."""
        away = [
            problem
            for problem in problems
            if (problem.code if isinstance(problem, CallRefused) else getattr(problem, "kind", "")) in NOT_ADMITTED
        ]
        if len(away) > problems.count(None):
            self.final_error = Excluded(f"the swarm does not admit this worker: {away[0]}")

    # Number

    def may_ask(self, members: Membership, now: float) -> bool:
        """Whether this worker asks for a number, once more. It gives up some time after the first question."""
        if self.phase is not JoinPhase.ASKING:
            return False
        self._asking_end = self._asking_end or now + timing.SEARCH_SECONDS
        if now < self._asking_end:
            return True
        self.final_error = RendezvousError(
            f"the swarm has given this worker no number within {timing.SEARCH_SECONDS:g} s: {self._no_number} "
            f"({len(members.peers)} workers are known); see {command('doctor', '-')}, and try again"
        )
        return False

    def take_number(self, number: int) -> None:
        self.number = number

    def record_no_number(self, members: Membership, leader: str, problem: Exception) -> str:
        """The leader has given no number; returns why, for the user."""
        name = f"worker {members.number_of(leader)} ({leader[-6:]}), which leads it,"
        refused = not isinstance(problem, Unreachable)
        self._no_number = f"{name} says: {problem}" if refused else f"{name} cannot be reached from here"
        return self._no_number


def number_giver(members: Membership) -> str | None:
    """Return the member to ask for a number: the leader. None if no other worker is known to lead."""
    leader = members.leader()
    return None if leader == members.me else leader


def giver_of_another_number(members: Membership) -> str | None:
    """Return the member to ask for another number, if another live worker has this one's, and a lower key."""
    return number_giver(members) if clashes(members, members.me) else None


def next_look_seconds(pause_seconds: float, *, found: bool) -> float:
    """Return the next pause between two looks for members that are not known. `found`: the last one has found a
    member."""
    longer = min(timing.LONGEST_LOOK_SECONDS, timing.LOOK_GROWTH * pause_seconds)
    return timing.LOOK_SECONDS if found else longer


# The leader's side


def give_number(members: Membership, name: str, wished: int) -> int:
    """Return the number of this peer, a new one if another peer with a lower key has it too. Raises CallRefused."""
    leader = members.leader()
    if leader != members.me:
        raise CallRefused(f"{leader} leads, not this worker", "leader")
    numbers = {**members.numbers, members.me: members.status.number}
    taken = set(numbers.values())
    number = numbers.get(name)
    told = {peer.status.number for peer in members.peers.values() if peer.status.number >= 0}  # as others say
    if number is None:
        number = wished if wished >= 0 and wished not in taken else _next_number(taken | told)
    elif any(other < name for other, others_number in numbers.items() if others_number == number):
        number = _next_number(taken | told)
    members.numbers[name] = number
    return number


def _next_number(taken: set[int]) -> int:
    """Return the number above all that are taken; the lowest free one if a member claims the highest that there is."""
    return max(taken) + 1 if max(taken) < MAX_NUMBER else min(set(range(len(taken) + 1)) - taken)
