"""A round's plan: the workers in it, the parts that each of them reduces, and what follows from their headers. Pure.

The leader makes the plan and every worker in it checks it. From the same headers all workers come to the same decision
(core/merging.py), so a leader cannot weigh, admit or leave out a contribution otherwise than the rules say. The
leader does decide whose headers are in the plan.
"""

import hashlib
import math
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, structs

from diloco.core.config import Merge
from diloco.core.merging import FEWEST_FOR_NORMS, MAX_WEIGHT_ROUNDS, Decision, decide, diverged
from diloco.engines.header import HEADER_BYTES, Header, find_report_fault, unpack
from diloco.engines.note import MAX_NOTE_BYTES, MalformedNote, read_note
from diloco.engines.rounds import RoundKey
from diloco.errors import EngineError
from diloco.swarm.protocol.status import PeerName
from diloco.swarm.protocol.wire import Malformed, PeerMessage, encode
from diloco.swarm.trainer import PresentWorker

MAX_WORKERS = 1024
POINTS_AGAINST = "its contribution points against the others'"
"""Why it is not in the mean."""

_MOST = 1 << 53
Share = Annotated[int, Meta(ge=0, le=1 << 10)]
Rounds = Annotated[int, Meta(ge=1, le=MAX_WEIGHT_ROUNDS)]
Count = Annotated[int, Meta(ge=0, le=_MOST)]


class Authority(NamedTuple):
    """Orders the leaders of a round: the highest is obeyed. A later term beats an earlier, a lower number a higher."""

    term: Count
    minus_number: Annotated[int, Meta(ge=-_MOST, le=1)]
    attempt: Count = 0

    @property
    def leader(self) -> tuple[int, int]:
        return (self.term, self.minus_number)


NO_AUTHORITY = Authority(0, -(1 << 30))


class Entry(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A worker whose header is in the round."""

    peer: PeerName
    contribution: PresentWorker

    def __post_init__(self) -> None:
        if self.number < 0 or len(self.contribution.note) > MAX_NOTE_BYTES:
            raise Malformed(f"worker {self.number} with a note of {len(self.contribution.note)} bytes")
        assert self.parsed is not None  # raises Malformed

    @property
    def number(self) -> int:
        return self.contribution.worker

    @property
    def root(self) -> bytes:
        return self.contribution.root

    @cached_property
    def parsed(self) -> Header:
        return parse_header(self.number, self.contribution.header)

    @cached_property
    def fault(self) -> str | None:
        """Why no other worker can use what the worker says beside its contribution; None: all of it can be read."""
        try:
            read_note(self.contribution.note)
        except MalformedNote as problem:
            return f"malformed: {problem}"
        return find_report_fault(self.parsed.member.report)

    @property
    def for_trainer(self) -> PresentWorker:
        """The contribution as the other workers' trainers get it: without a note if that cannot be read."""
        return self.contribution if self.fault is None else structs.replace(self.contribution, note=b"")


def parse_header(number: int, data: bytes) -> Header:
    if len(data) != HEADER_BYTES:
        raise Malformed(f"a header of {len(data)} bytes instead of {HEADER_BYTES}: run the same version everywhere")
    try:
        return unpack(number, data)
    except EngineError as error:
        raise Malformed(str(error)) from error


class Offence(NamedTuple):
    """A header that no honest worker sends, and why it is refused."""

    peer: str
    number: int
    reason: str


class Plan(PeerMessage, frozen=True, dict=True):
    """The workers of a round and their headers, from which all make the same decision."""

    key: RoundKey
    authority: Authority
    leader: PeerName
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_WORKERS)]
    """In worker order: the order in which contributions are added up."""
    roster: Annotated[tuple[int, ...], Meta(max_length=MAX_WORKERS)]
    majority: bool
    """Most members of the round before it are in it (quorum.py): no other plan of this round can be committed."""
    max_norm_ratio: float | None
    merge: Merge = "mean"
    shares: Annotated[tuple[Share, ...], Meta(max_length=MAX_WORKERS)] = ()
    """The share of each entry in the reduction (protocol/shares.py); () if all have the same one."""
    rounds: Annotated[tuple[Rounds, ...], Meta(max_length=MAX_WORKERS)] = ()
    """The rounds of work that each entry counts as at most (protocol/missed_rounds.py); () if as one each."""
    counted: Annotated[tuple[int, ...], Meta(max_length=MAX_WORKERS)] = ()
    """Live members with the state, and work in an earlier mean: they count for the next round too (quorum.py)."""
    last_ended: Annotated[int, Meta(ge=-1)] = -1
    """The last round that has ended for its leader; -1: none."""
    opposed: Annotated[tuple[int, ...], Meta(max_length=MAX_WORKERS)] = ()
    """Workers of it whose contribution points against the others' (audit/directions.py): it is not in the mean."""

    def __post_init__(self) -> None:
        if self.rounds and len(self.rounds) != len(self.entries):
            raise Malformed(f"{len(self.rounds)} rounds of work for {len(self.entries)} entries")
        if self.shares and (len(self.shares) != len(self.entries) or not any(self.shares)):
            raise Malformed(f"{len(self.shares)} shares for {len(self.entries)} entries, or no share at all")
        if not self.entries:
            raise Malformed("a plan without workers")
        numbers = [entry.number for entry in self.entries]
        if numbers != sorted(set(numbers)) or len({entry.peer for entry in self.entries}) != len(self.entries):
            raise Malformed("the entries of a plan are not in worker order, each once")
        if not set(self.opposed) <= set(numbers) or 2 * len(set(self.opposed)) >= max(1, len(numbers)):
            raise Malformed(f"{len(self.opposed)} of {len(numbers)} workers point against the others")
        if any(entry.parsed.key != self.key for entry in self.entries):
            raise Malformed("a header of another round")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the plan; workers sign it to name the plan."""
        return hashlib.sha256(encode(self)).digest()

    @cached_property
    def decision(self) -> Decision:
        faults = {entry.number: entry.fault for entry in self.entries if entry.fault is not None}
        counts = self.rounds or (1,) * len(self.entries)
        judged = [
            (entry, count)
            for entry, count in zip(self.entries, counts, strict=True)
            if entry.number not in self.opposed
        ]
        claims = [
            entry.parsed.claim if entry.fault is None else replace(entry.parsed.claim, norm=math.nan)  # it is refused
            for entry, _ in judged
        ]
        numbers = [entry.number for entry, _ in judged]
        decided = decide(numbers, claims, self.max_norm_ratio, self.merge, [count for _, count in judged])
        return replace(decided, refused=decided.refused | dict.fromkeys(self.opposed, POINTS_AGAINST) | faults)

    @cached_property
    def contributors(self) -> tuple[Entry, ...]:
        chosen = set(self.decision.contributors)
        return tuple(entry for entry in self.entries if entry.number in chosen)

    def offences(self) -> list[Offence]:
        """Return the contributions that no honest worker sends.

        No offence: another anchor, another direction or next to nothing, unless its note or report cannot be read; the
        large norm of a worker that says that it missed rounds, since it carries more work then; a large norm among
        fewer than four, where the others' may as well be too small; and if all are refused at once.
        """
        if not self.contributors:
            return []
        anchors = [entry.parsed.claim.anchor_digest for entry in self.entries]
        elsewhere = {self.entries[position].number for position in diverged(anchors)}
        offences = list[Offence]()
        decision = self.decision
        harmless = decision.too_short | set(self.opposed)
        norms_tell = len(self.contributors) + len(decision.too_long) >= FEWEST_FOR_NORMS
        for entry in self.entries:
            claim = entry.parsed.claim
            number = entry.number
            reason = decision.refused.get(number) or decision.clipped.get(number)
            by_norm = number in decision.clipped or number in decision.too_long
            is_sure = not by_norm or (norms_tell and claim.weight <= claim.round_weight)
            is_dishonest = entry.fault is not None or (number not in elsewhere and number not in harmless)
            if reason is not None and is_sure and is_dishonest:
                offences.append(Offence(entry.peer, number, reason))
        return offences

    @cached_property
    def liars(self) -> frozenset[str]:
        """Workers whose contribution is not in the mean, and is one that no honest worker sends."""
        return frozenset(offence.peer for offence in self.offences()) - {entry.peer for entry in self.contributors}

    @property
    def longest(self) -> float:
        """The norm of the mean is at most this: a mean is never longer than the longest contribution in it.

        The centre of a clipped one has an element of each of them, so that their squares add up at worst.
        """
        scales = self.decision.scales or (1.0,) * len(self.contributors)
        longest = max(e.parsed.claim.norm * scale for e, scale in zip(self.contributors, scales, strict=True))
        return longest * math.sqrt(len(self.contributors)) if self.decision.merge != "mean" else longest

    @property
    def opposed_peers(self) -> list[str]:
        return [entry.peer for entry in self.entries if entry.number in self.opposed]

    def entry(self, peer: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.peer == peer), None)

    @property
    def has_mean(self) -> bool:
        return self.decision.total_weight > 0

    @property
    def reducers(self) -> set[str]:
        """The contributors that have a share in the reduction; with few parts some of them get none."""
        share_of = dict(zip((entry.peer for entry in self.entries), self.shares, strict=False))
        names = [entry.peer for entry in self.contributors]
        return {name for name in names if share_of.get(name, 1)} or {*names}

    def ranges(self, num_parts: int) -> dict[str, range]:
        """Return a map: contributor -> the parts that it reduces: consecutive ones, divided by shares as whole parts
        allow."""
        share_of = dict(zip((entry.peer for entry in self.entries), self.shares, strict=False))
        shares = [share_of.get(entry.peer, 1) for entry in self.contributors]
        sums = list(accumulate(shares if any(shares) else [1 for _ in shares], initial=0))
        bounds = [num_parts * below // (sums[-1] or 1) for below in sums]
        return {entry.peer: range(bounds[i], bounds[i + 1]) for i, entry in enumerate(self.contributors)}
