"""The members of a swarm over time, as the workers of this machine see them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from diloco.history.columns import Columns
from diloco.history.events import (
    Event,
    ListedMember,
    MemberBannedEvent,
    MemberEvent,
    MemberExpelledEvent,
    MemberJoinedEvent,
    MemberLeftEvent,
    MemberLostEvent,
    MemberReasonEvent,
    MembersEvent,
    RoundMember,
    WorkerEndedEvent,
)
from diloco.history.notes import reason_of

GONE = ("left", "lost", "banned", "excluded")
"""The states of a member that is no longer there."""
_CHANGES: dict[type[Event], str] = {
    MemberJoinedEvent: "joined",
    MemberLeftEvent: "left",
    MemberLostEvent: "lost",
    MemberBannedEvent: "banned",
    MemberExpelledEvent: "excluded",
}
_MOST_MEMBERS = 4096


@dataclass
class MemberHistory:
    """The history of a member of the swarm: its states, and the numbers that the lists of all members have of it."""

    peer: str = ""
    label: str = ""
    link: str = ""
    """`direct`, `relay`, or empty if that is not known."""
    states: list[tuple[float, str, str]] = field(default_factory=list)
    """Each change of its state: the time, the state from then on, and the reason."""
    columns: Columns = field(
        default_factory=lambda: Columns("step", "loss", "contributed", "latency_seconds", "step_seconds", "tokens")
    )

    def change(self, time: float, state: str, reason: str = "") -> None:
        """Note the state, if it is another one than before."""
        if not self.states or self.states[-1][1] != state:
            self.states.append((time, state, reason))


class MembersHistory:
    """The members of a swarm by number. Thousands may come and go: the first _MOST_MEMBERS are kept, and the others are
    only counted."""

    def __init__(self) -> None:
        self.by_number: dict[int, MemberHistory] = {}
        self.listed: set[int] = set()
        """The members of the last list, and those in rounds since."""
        self._left_out: set[int] = set()
        self.last_digests: dict[str, str] = {}
        """Worker -> the digest of its last parameters, as all confirmed them at the end."""

    @property
    def left_out(self) -> int:
        """The number of members that are only counted."""
        return len(self._left_out)

    def changed(self, event: MemberEvent) -> None:
        """Take in that a member came or went."""
        state = _CHANGES.get(type(event))
        if state is None or (member := self._member(event.member)) is None:
            return
        member.peer = event.peer
        member.label = event.label or member.label
        member.change(event.time, state, reason_of(event) if isinstance(event, MemberReasonEvent) else "")

    def list_all(self, event: MembersEvent) -> None:
        """Take in a list of all members."""
        self.listed = {listed.member for listed in event.present}
        for listed in event.present:
            if (member := self._member(listed.member)) is not None:
                self._take_in_listed(event.time, listed, member)

    def _take_in_listed(self, time: float, listed: ListedMember, member: MemberHistory) -> None:
        member.label = listed.where
        member.link = listed.link or member.link
        last = member.states[-1][1] if member.states else ""
        if not (last in ("banned", "excluded") and listed.state in GONE):
            member.change(time, listed.state)
        member.columns.append(asdict(listed) | {"time": time})

    def agreed(self, ended: WorkerEndedEvent) -> None:
        """Take in the digests in a worker's last event."""
        members: Sequence[RoundMember] = ended.confirmed or ended.members
        for member in members:
            self.last_digests[str(member.worker)] = member.anchor_digest
        self.last_digests.setdefault(str(ended.worker), str(ended.anchor_digest))

    def _member(self, number: int) -> MemberHistory | None:
        if number not in self.by_number and len(self.by_number) >= _MOST_MEMBERS:
            self._left_out.add(number)
            return None
        return self.by_number.setdefault(number, MemberHistory())
