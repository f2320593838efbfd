"""A round's plan: who is in it, who reduces which parts, and what follows from the headers. Pure.

The leader makes it, everyone in it checks it: from the same headers all come to the same decision
(engines/reducing.py), so a leader cannot weigh, admit or leave out a contribution otherwise than the rules say. What it
does decide is whose headers are in it, and who was found to have sent other parts than it claimed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from diloco.engines.header import HEADER_BYTES, Header, unpack
from diloco.engines.reduction import Decision, decide
from diloco.engines.rounds import RoundKey
from diloco.engines.swarm.node.wire import Malformed, Message
from diloco.errors import EngineError

MAX_NOTE_BYTES = 1 << 14


class Authority(NamedTuple):
    """Whose word counts in a round: the higher one's. A later term beats an earlier, a lower number a higher."""

    term: int
    minus_number: int
    attempt: int = 0

    @property
    def leader(self) -> tuple[int, int]:
        return (self.term, self.minus_number)


@dataclass(frozen=True)
class Entry:
    """A worker whose header is in the round."""

    peer: str
    number: int
    header: bytes
    note: bytes

    @cached_property
    def parsed(self) -> Header:
        return parse_header(self.number, self.header)

    def to_wire(self) -> list[object]:
        return [self.peer, self.number, self.header, self.note]

    @classmethod
    def from_wire(cls, values: Any) -> "Entry":
        match values:
            case [str() as peer, int() as number, bytes() as header, bytes() as note]:
                if len(note) <= MAX_NOTE_BYTES and number >= 0 and len(peer) < 128:
                    return cls(peer, number, header, note)
        raise Malformed("not an entry of a plan")


def parse_header(number: int, data: bytes) -> Header:
    if len(data) != HEADER_BYTES:
        raise Malformed(f"a header of {len(data)} bytes instead of {HEADER_BYTES}: run the same version everywhere")
    try:
        return unpack(number, data)
    except EngineError as error:
        raise Malformed(str(error)) from error


@dataclass(frozen=True)
class Plan:
    key: RoundKey
    authority: Authority
    leader: str
    entries: tuple[Entry, ...]
    """In worker order: the order in which contributions are added up."""
    excluded: dict[int, str]
    """Found out by the reducers: what was sent is not what was claimed. By worker number."""
    roster: tuple[int, ...]
    max_norm_ratio: float | None

    @cached_property
    def decision(self) -> Decision:
        taking = [entry for entry in self.entries if entry.number not in self.excluded]
        decided = decide([e.number for e in taking], [e.parsed.claim for e in taking], self.max_norm_ratio)
        return Decision(
            decided.contributors, decided.weights, {**decided.refused, **self.excluded}, resync=decided.resync
        )

    @cached_property
    def contributors(self) -> tuple[Entry, ...]:
        chosen = set(self.decision.contributors)
        return tuple(entry for entry in self.entries if entry.number in chosen)

    def entry(self, peer: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.peer == peer), None)

    @property
    def has_mean(self) -> bool:
        return self.decision.total_weight > 0

    def ranges(self, num_parts: int) -> dict[str, range]:
        """Which parts each contributor reduces: consecutive ones, shared out as evenly as whole parts allow."""
        count = len(self.contributors)
        bounds = [num_parts * index // count for index in range(count + 1)] if count else [0]
        return {entry.peer: range(bounds[i], bounds[i + 1]) for i, entry in enumerate(self.contributors)}

    def to_wire(self) -> dict[str, object]:
        return {
            "sequence": self.key.sequence,
            "fragment": self.key.fragment,
            "authority": list(self.authority),
            "leader": self.leader,
            "entries": [entry.to_wire() for entry in self.entries],
            "excluded": [[number, reason] for number, reason in self.excluded.items()],
            "roster": list(self.roster),
            "ratio": self.max_norm_ratio,
        }

    @classmethod
    def from_wire(cls, message: Message) -> "Plan":
        entries = tuple(Entry.from_wire(values) for values in message.items("entries"))
        numbers = [entry.number for entry in entries]
        if numbers != sorted(set(numbers)) or len({entry.peer for entry in entries}) != len(entries):
            raise Malformed("the entries of a plan are not in worker order, each once")
        excluded: dict[int, str] = {}
        for pair in message.items("excluded"):
            match pair:
                case [int() as number, str() as reason]:
                    excluded[number] = reason[:200]
                case _:
                    raise Malformed("not an excluded worker")
        roster = message.items("roster")
        if not all(isinstance(number, int) for number in roster):
            raise Malformed("a roster is numbers")
        key = RoundKey(message.number("sequence"), message.number("fragment", low=-1))
        plan = cls(
            key,
            authority_from(message.items("authority")),
            message.text("leader"),
            entries,
            excluded,
            tuple(roster),
            message.real("ratio") if message.has("ratio") else None,
        )
        if any(entry.parsed.key != key for entry in entries):
            raise Malformed("a header of another round")
        return plan


def authority_from(values: list[Any]) -> Authority:
    match values:
        case [int() as term, int() as minus, int() as attempt]:
            return Authority(term, minus, attempt)
    raise Malformed("not an authority")
