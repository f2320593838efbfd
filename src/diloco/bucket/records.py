"""What the workers of a run write into their bucket, and where. All of it is read as hostile: typed and bounded.

members/3                    worker 3 is taken: by the worker whose name is in it
beats/3                      how far worker 3 is; written again and again, and its age tells whether it is alive
rounds/0000000012/data/3-…   its encoded outer gradient in round 12
rounds/0000000012/post/3     its claims, and the digests of that data. From now on it may be in the round's plan
rounds/0000000012/plan       the posts that are in the round: created once, by whichever worker is first
rounds/0000000012/mean/2     the mean of the third range of parts: what it holds follows from the plan alone
ends/0000000012/…            the same for the workers that end after round 11, and confirm it
states/0000000013/record     anchors and momentum before round 13, for joiners; the tensors are beside it
files/…                      the run's description, tokenizer and text
"""

import hashlib
import math
from dataclasses import replace
from functools import cached_property
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from diloco.bucket.store import Malformed as Malformed
from diloco.codecs.registry import CODECS, codec
from diloco.core.config import Merge
from diloco.core.fragments import PART_QUANTUM
from diloco.core.merging import MAX_WEIGHT_ROUNDS, Decision, decide
from diloco.engines.header import HEADER_BYTES, Header, find_report_fault, unpack
from diloco.engines.note import MAX_NOTE_BYTES, MalformedNote, read_note
from diloco.engines.rounds import Member, Report, RoundKey
from diloco.errors import EngineError
from diloco.swarm.protocol.status import MAX_NUMBER, Status

MAX_WORKERS = 1024
_LEAST_CHUNK_BYTES, _MOST_CHUNKS = 1 << 18, 256
"""Parts are read, checked and shared out in chunks: not smaller than this, and not more than so many a contribution."""
_MOST_PART_ELEMENTS = 1 << 24
_MOST_BYTES = 1 << 44
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Nonce = Annotated[str, Meta(min_length=16, max_length=16, pattern="^[0-9a-f]*$")]


class Record(Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="t"):
    """The base of all records."""


R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes | bytearray, kind: type[R]) -> R:
    """Read a record; raises Malformed for everything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as problem:
        raise Malformed(f"a {kind.__name__} that cannot be read: {str(problem)[:200]}") from None


class MemberClaim(Record, frozen=True):
    """Who a worker number belongs to: a name that only that worker's run folder has."""

    worker: Nonce
    label: Annotated[str, Meta(max_length=64)] = ""


class WorkerBeat(Record, frozen=True):
    """How far a worker is."""

    status: Status
    lost_seconds: Annotated[float, Meta(gt=0, le=3600)]
    """If no other one has come after this time, the worker counts as lost."""
    first_round: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    """The first round of this worker since it joined."""
    left: bool = False
    """The worker has ended, or was stopped."""


class VectorEncoding(Struct, frozen=True, forbid_unknown_fields=True):
    """How the vectors of a round are encoded: enough for any worker to reduce them."""

    codec: Annotated[str, Meta(max_length=32)]
    part_elements: Annotated[int, Meta(ge=1, le=_MOST_PART_ELEMENTS)]
    num_parts: Annotated[int, Meta(ge=0, le=_MOST_BYTES)]

    def __post_init__(self) -> None:
        if self.codec not in CODECS or self.part_elements % PART_QUANTUM:
            raise Malformed(f"parts of {self.part_elements} elements by codec {self.codec!r}")

    @property
    def part_bytes(self) -> int:
        return codec(self.codec).part_bytes(self.part_elements)

    @property
    def mean_part_bytes(self) -> int:
        return codec(self.codec).for_means.part_bytes(self.part_elements)

    def chunks(self) -> list[range]:
        """The parts in chunks, each with a digest of its own."""
        at_once = max(1, _LEAST_CHUNK_BYTES // self.part_bytes, -(-self.num_parts // _MOST_CHUNKS))
        return [range(first, min(first + at_once, self.num_parts)) for first in range(0, self.num_parts, at_once)]

    def digests(self, data: memoryview) -> tuple[bytes, ...]:
        """SHA-256 of each chunk of an encoded vector."""
        size = self.part_bytes
        return tuple(hashlib.sha256(data[chunk.start * size : chunk.stop * size]).digest() for chunk in self.chunks())


class Post(Record, frozen=True, dict=True):
    """A worker's contribution to a round: its claims, and where the data is."""

    worker: Number
    header: Annotated[bytes, Meta(min_length=HEADER_BYTES, max_length=HEADER_BYTES)]
    note: Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]
    nonce: Nonce
    encoding: "VectorEncoding"
    digests: Annotated[tuple[Digest, ...], Meta(max_length=_MOST_CHUNKS + 1)]
    """SHA-256 of each chunk of parts."""

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.encoding.chunks()):
            raise Malformed(f"{len(self.digests)} digests for {self.encoding.num_parts} parts")
        assert self.parsed is not None  # raises Malformed

    @cached_property
    def parsed(self) -> Header:
        try:
            return unpack(self.worker, self.header)
        except EngineError as error:
            raise Malformed(str(error)) from error

    @cached_property
    def fault(self) -> str | None:
        """Why no other worker can use what it says beside its contribution; None: all of it can be read."""
        try:
            read_note(self.note)
        except MalformedNote as problem:
            return f"malformed: {problem}"
        return find_report_fault(self.parsed.member.report)

    @property
    def member(self) -> Member:
        """The worker as the others hear of it, without what cannot be used."""
        member = self.parsed.member
        if self.fault is None:
            return replace(member, note=self.note)
        report = member.report
        return replace(member, report=Report(stopping=report.stopping, done=report.done))

    @property
    def data_name(self) -> str:
        return f"{round_prefix(self.parsed.key)}data/{self.worker}-{self.nonce}"


class RoundPlan(Record, frozen=True, dict=True):
    """The posts that are in a round. The mean, its weights and its bits follow from it."""

    key: RoundKey
    posts: Annotated[tuple[Post, ...], Meta(max_length=MAX_WORKERS)] = ()
    """In worker order: the order in which contributions are added up. Without any, the round is over without a mean:
    all that began it have given it up."""
    max_norm_ratio: float | None = None
    merge: Merge = "mean"
    rounds: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_WEIGHT_ROUNDS)], ...], Meta(max_length=MAX_WORKERS)] = ()
    """The rounds of work that each post counts as at most; () if as one each."""
    unusable: Annotated[tuple[Number, ...], Meta(max_length=MAX_WORKERS)] = ()
    """The workers whose data is not what they have posted; found out after the plan was made."""

    def __post_init__(self) -> None:
        numbers = [post.worker for post in self.posts]
        if numbers != sorted(set(numbers)):
            raise Malformed("the posts of a plan are not in worker order, each once")
        if self.rounds and len(self.rounds) != len(self.posts):
            raise Malformed(f"{len(self.rounds)} rounds of work for {len(self.posts)} posts")
        for post in self.posts:
            header = post.parsed
            if (header.key, header.layout_digest) != (self.key, self.posts[0].parsed.layout_digest):
                raise Malformed("a plan with posts of another round or another model")
            if post.encoding != self.encoding:
                raise Malformed("a plan with posts of different encodings")

    def without(self, worker: int) -> "RoundPlan":
        """The same round without the contribution of a worker whose data cannot be used."""
        return msgspec.structs.replace(self, unusable=tuple(sorted({*self.unusable, worker})))

    @cached_property
    def decision(self) -> Decision:
        """Which contributions are in the mean, and how much each counts."""
        if not self.posts:
            return Decision((), (), {}, resync=False)
        faults = {post.worker: post.fault for post in self.posts if post.fault is not None}
        faults |= dict.fromkeys(self.unusable, "its data in the bucket is not what it has posted")
        claims = [
            replace(post.parsed.claim, norm=math.nan) if post.worker in faults else post.parsed.claim  # it is refused
            for post in self.posts
        ]
        numbers = [post.worker for post in self.posts]
        decided = decide(numbers, claims, self.max_norm_ratio, self.merge, self.rounds or (1,) * len(self.posts))
        return replace(decided, refused=decided.refused | faults)

    @property
    def has_mean(self) -> bool:
        return self.decision.total_weight > 0

    @cached_property
    def contributors(self) -> tuple[Post, ...]:
        chosen = set(self.decision.contributors)
        return tuple(post for post in self.posts if post.worker in chosen)

    @property
    def encoding(self) -> VectorEncoding:
        return self.posts[0].encoding

    def ranges(self) -> list[list[range]]:
        """The chunks that each contributor reduces first: consecutive ones, divided as evenly as whole chunks allow."""
        if not self.has_mean:
            return []
        chunks = self.encoding.chunks()
        count = len(self.contributors)
        bounds = [len(chunks) * below // count for below in range(count + 1)]
        return [chunks[bounds[i] : bounds[i + 1]] for i in range(count)]

    def post_of(self, worker: int) -> Post | None:
        return next((post for post in self.posts if post.worker == worker), None)


class MeanRange(Record, frozen=True):
    """What stands before the bytes of a range of the mean."""

    author: Number
    comparison: Annotated[tuple[float, ...], Meta(max_length=MAX_WORKERS * MAX_WORKERS)]
    """Comparison.numbers of these parts."""
    digest: Digest
    """SHA-256 of the bytes that follow."""
    unusable: Number | None = None
    """There is no mean with the contribution of this worker, whose data cannot be used: all leave it out."""


class StateRecord(Record, frozen=True):
    """A global state: everything up to its round, which comes next."""

    numbers: Annotated[dict[Annotated[str, Meta(max_length=64)], int], Meta(max_length=1 << 16)]
    layout_digest: Annotated[str, Meta(max_length=64)]
    note: Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]
    tensors: Annotated[str, Meta(max_length=64, pattern=r"^tensors-[0-9a-f]{16}$")]
    num_bytes: Annotated[int, Meta(ge=0, le=_MOST_BYTES)]
    digest: Digest
    """SHA-256 of the tensors' file."""


# Names


def sequence_prefix(sequence: int) -> str:
    return f"rounds/{sequence:010d}/"


def round_prefix(key: RoundKey) -> str:
    return sequence_prefix(key.sequence) if key.fragment >= 0 else f"ends/{key.sequence:010d}/"


def sequence_of(name: str) -> int | None:
    """The number that an object's name below `rounds/`, `ends/` or `states/` has; None if there is none."""
    parts = name.split("/")
    is_numbered = len(parts) > 2 and parts[0] in ("rounds", "ends", "states") and len(parts[1]) == 10
    return int(parts[1]) if is_numbered and parts[1].isascii() and parts[1].isdigit() else None


def number_in(name: str) -> int | None:
    """The worker number, or another small one, at the end of an object's name; None if there is none."""
    rest = name.rpartition("/")[2]
    return int(rest) if rest.isascii() and rest.isdigit() and len(rest) <= 7 else None


def state_prefix(sequence: int) -> str:
    return f"states/{sequence:010d}/"


# A range of the mean: its head, then its bytes


def join_mean(head: MeanRange, data: bytes) -> bytes:
    record = encode(head)
    return len(record).to_bytes(4, "little") + record + data


def split_mean(content: bytes | bytearray, num_bytes: int) -> tuple[MeanRange, memoryview]:
    """The head of a range of the mean, and its bytes."""
    length = int.from_bytes(content[:4], "little")
    head = decode(content[4 : 4 + length], MeanRange)
    data = memoryview(content)[4 + length :]
    if head.unusable is not None:
        num_bytes = 0
    if len(data) != num_bytes or hashlib.sha256(data).digest() != head.digest:
        raise Malformed(f"a range of the mean with {len(data)} bytes instead of {num_bytes}, or with another digest")
    return head, data
