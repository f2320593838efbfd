"""The members of a swarm over time, as the workers of this machine see them."""

from dataclasses import dataclass, field
from typing import Any

from diloco.dashboard.columns import Columns, count
from diloco.history.log import Event
from diloco.history.notes import reason_of

_CHANGES = {
    "member_joined": "joined",
    "member_left": "left",
    "member_lost": "lost",
    "member_banned": "banned",
    "member_expelled": "excluded",
}
_MOST_MEMBERS = 4096
GONE = ("left", "lost", "banned", "excluded")


@dataclass
class Member:
    peer: str = ""
    label: str = ""
    link: str = ""
    """`direct`, `relay`, or empty if that is not known."""
    states: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, state, reason."""
    columns: Columns = field(
        default_factory=lambda: Columns(
            "time", "step", "loss", "contributed", "latency_seconds", "step_seconds", "tokens"
        )
    )

    def change(self, time: float, state: str, reason: str = "") -> None:
        if not self.states or self.states[-1][1] != state:
            self.states.append((time, state, reason))


class Members:
    """By number. Thousands may come and go: the first _MOST_MEMBERS are kept, and the rest is counted."""

    def __init__(self) -> None:
        self.by_number: dict[int, Member] = {}
        self._left_out: set[int] = set()
        self.last_digests: dict[str, str] = {}
        """Worker -> the digest of its last parameters, as all confirmed them at the end."""

    @property
    def left_out(self) -> int:
        return len(self._left_out)

    def update(self, event: Event) -> None:
        if event["type"] in _CHANGES:
            if (member := self._member(event["member"])) is None:
                return
            member.peer, member.label = str(event.get("peer") or ""), str(event.get("label") or member.label)
            member.change(event["time"], _CHANGES[event["type"]], reason_of(event))
        elif event["type"] == "members":
            for one in event["present"]:
                if (member := self._member(one["member"])) is not None:
                    self._listed(event["time"], one, member)

    def _listed(self, time: float, one: dict[str, Any], member: Member) -> None:
        member.label, member.link = str(one.get("where") or ""), str(one.get("link") or member.link)
        last = member.states[-1][1] if member.states else ""
        state = str(one.get("state") or "")
        if not (last in ("banned", "excluded") and state in GONE):
            member.change(time, state)
        member.columns.append(one | {"time": time})

    def agreed(self, ended: Event) -> None:
        """The digests in a worker's last event."""
        for member in ended.get("confirmed") or ended.get("members") or ():
            self.last_digests[str(member["worker"])] = str(member.get("anchor_digest"))
        self.last_digests.setdefault(str(ended["worker"]), str(ended.get("anchor_digest")))

    def _member(self, number: int) -> Member | None:
        number = count(number)
        if number not in self.by_number and len(self.by_number) >= _MOST_MEMBERS:
            self._left_out.add(number)
            return None
        return self.by_number.setdefault(number, Member())

    def until(self, time: float | None) -> list[dict[str, Any]]:
        return [found for number in sorted(self.by_number) if (found := _state(number, self.by_number[number], time))]


def _state(number: int, member: Member, time: float | None) -> dict[str, Any] | None:
    states = [one for one in member.states if time is None or one[0] <= time]
    if not states:
        return None
    since, state, reason = states[-1]
    numbers = {name: member.columns.last(name, time) for name in member.columns.names if name != "time"}
    joined = next((at for at, what, _ in states if what not in GONE), since)
    return {
        "member": number, "peer": member.peer, "label": member.label, "link": member.link, "state": state,
        "since": since, "joined": joined, "reason": reason, **numbers,
    }  # fmt: skip
