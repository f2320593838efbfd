"""All messages between peers, one type each.

A call is a request and its answer. A stream begins with one message of its opener. `decode` accepts these types only,
with every field of its type and within its bounds.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from diloco.core.config import Merge
from diloco.engines.note import MalformedNote, read_note
from diloco.swarm.network.transport import MAX_CALL_BYTES
from diloco.swarm.protocol.certificate import Certificate, Ranges, Sha256, Vote
from diloco.swarm.protocol.plan import MAX_WORKERS, NO_AUTHORITY, Authority, Plan
from diloco.swarm.protocol.proofs import LongParts, TwoPlans, TwoRanges
from diloco.swarm.protocol.status import Addresses, PeerName, Process, RunStatus, Status
from diloco.swarm.protocol.wire import Malformed, PeerMessage
from diloco.swarm.trainer import PresentWorker

T = TypeVar("T", bound=PeerMessage)

_LARGEST_FILE = 1 << 42
MOST_ENDS = 4096
END_BYTES = 8

Text = Annotated[str, Meta(max_length=512)]
Sequence = Annotated[int, Meta(ge=0, le=1 << 62)]
"""The number of a round."""
Credential = Annotated[bytes, Meta(max_length=4096)]
Revocations = Annotated[tuple[bytes, ...], Meta(max_length=1024)]


# Members


class RosterEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member that the sender knows."""

    peer: PeerName
    credential: Credential
    addresses: Addresses
    number: Annotated[int, Meta(ge=-1, le=1 << 20)]


Roster = Annotated[tuple[RosterEntry, ...], Meta(max_length=1024)]


class Hello(PeerMessage, frozen=True, tag="hello"):
    """The first message to a peer, and the answer: the sender shows its credential."""

    protocol: int
    version: Text
    role: Literal["worker", "guest", "joiner"]
    """A joiner is a guest that is about to become a worker with the invitation that it shows."""
    credential: Credential
    addresses: Addresses
    status: Status
    roster: Roster = ()
    revocations: Revocations = ()
    seats: Annotated[tuple[tuple[PeerName, Credential], ...], Meta(max_length=64)] = ()
    """Workers that are away or banned, with the credentials that show whose seats are taken."""


class HelloVersion(Struct, frozen=True, tag="hello", tag_field="t"):
    """The fields of Hello that peers of all versions can read."""

    protocol: int = 0
    version: str = ""


class Beat(PeerMessage, frozen=True):
    """A heartbeat, and the answer to one."""

    status: Status
    addresses: Addresses
    known: Annotated[tuple[Text, ...], Meta(max_length=1024)]
    """The live members as the sender sees them, by the ends of their names."""
    revocations_digest: Text
    ended: Annotated[bytes, Meta(max_length=END_BYTES)] = b""
    """The beginning of the digest of the plan that has ended the sender's last round; empty if it does not keep
    that."""
    roster: Roster = ()
    """Members that the receiver does not know."""
    revocations: Revocations = ()


class Addressed(PeerMessage, frozen=True):
    """A request between two members, with the processes that are meant (node/calls.py)."""

    sender: Process
    receiver: Process
    """The receiver's process that the sender holds; "" where it knows none."""
    request: Annotated[bytes, Meta(max_length=MAX_CALL_BYTES)]


class AskNumber(PeerMessage, frozen=True):
    """A worker asks for a number; only the leader gives one."""

    wished: Annotated[int, Meta(ge=-1, le=1 << 20)]


class Number(PeerMessage, frozen=True):
    """The number of the asking worker."""

    number: Annotated[int, Meta(ge=0, le=1 << 20)]


class Goodbye(PeerMessage, frozen=True):
    """The sender leaves the run."""


class Done(PeerMessage, frozen=True):
    """The receiver has heard the message."""


# From a worker to the leader of its round


class Ready(PeerMessage, frozen=True):
    """The worker has posted a round: its header, for the leader."""

    contribution: PresentWorker
    max_norm_ratio: float | None
    merge: Merge = "mean"


class Waiting(PeerMessage, frozen=True):
    """The leader waits for others, or the round goes on."""


class Ended(PeerMessage, frozen=True):
    """The round has ended."""


class NotLeader(PeerMessage, frozen=True):
    """The asked worker does not lead this round."""


class Complete(PeerMessage, frozen=True):
    """The worker has the whole mean of this plan, and votes for it."""

    sequence: Sequence
    authority: Authority
    vote: Vote


Withheld = Literal["parts", "mean"]
"""What a worker that answers does not send: its parts to a reducer, or the mean of its range."""


class Trouble(PeerMessage, frozen=True):
    """The worker cannot exchange parts with `peer`; or accuses it of a lie, which its word does not prove."""

    sequence: Sequence
    authority: Authority
    peer: PeerName
    reason: Text
    lie: bool = False
    withheld: Withheld | None = None


class Opposed(PeerMessage, frozen=True):
    """A contribution points against the others, as the reducers have signed: no worker votes for this plan."""

    sequence: Sequence
    authority: Authority
    num_parts: Annotated[int, Meta(ge=0, le=1 << 40)]
    ranges: Ranges


# From the leader to the workers of its round; a Plan is a message too


class Commit(PeerMessage, frozen=True):
    """The mean of a plan counts: most have voted for it."""

    sequence: Sequence
    authority: Authority
    """The sender's."""
    plan: Annotated[bytes, Meta(max_length=32)]
    """The digest of the plan: an earlier leader's, where a new one has found its mean complete."""
    certificate: Certificate


class Inquire(PeerMessage, frozen=True):
    """A new leader asks for the state of a round, and to be obeyed in it."""

    sequence: Sequence
    authority: Authority


class Voted(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan whose whole mean a worker has, and its vote for that mean."""

    plan: Plan
    vote: Vote


class Posted(PeerMessage, frozen=True):
    """The worker has posted the round, obeys no lower authority from now on, and has this mean, if any."""

    contribution: PresentWorker
    max_norm_ratio: float | None = None
    merge: Merge = "mean"
    complete: Voted | None = None
    seen: Authority = NO_AUTHORITY
    """The highest that the worker had seen in this round before."""


class LedBy(PeerMessage, frozen=True):
    """The worker follows another leader, which is live."""

    leader: PeerName


class NotPosted(PeerMessage, frozen=True):
    """The worker has not posted this round."""


class Superseded(PeerMessage, frozen=True):
    """The worker follows a leader with a higher authority."""

    seen: Authority = NO_AUTHORITY


class PostNow(PeerMessage, frozen=True):
    """The others wait no longer: post this round with the work done so far."""

    sequence: Sequence


# Rounds that have ended


class AskOutcome(PeerMessage, frozen=True):
    """Asks how this round has ended for the receiver."""

    sequence: Sequence


class AskLastPlan(PeerMessage, frozen=True):
    """Asks how the last round has ended: its plan tells which members count from then on (quorum.py)."""


class Outcome(PeerMessage, frozen=True):
    """The plan and the certificate of a round. None: it has not ended, or is too old."""

    plan: Plan | None = None
    certificate: Certificate | None = None
    credentials: Annotated[dict[PeerName, Credential], Meta(max_length=MAX_WORKERS)] = field(default_factory=dict)
    """The credentials of its voters: the receiver may not have met them."""


class AskEnds(PeerMessage, frozen=True):
    """A worker that takes over the receiver's state asks how the rounds from this one on have ended there."""

    first: Sequence


class Ends(PeerMessage, frozen=True):
    """The answer to AskEnds: how the rounds have ended for the sender."""

    plans: Annotated[bytes, Meta(max_length=END_BYTES * MOST_ENDS)]
    """The beginnings of the plans' digests, one for each round; zeros where the sender does not know."""

    def __post_init__(self) -> None:
        if len(self.plans) % END_BYTES:
            raise Malformed(f"{len(self.plans)} bytes of digests")

    def plan(self, index: int) -> bytes:
        """Return how one round has ended; empty where the sender does not know."""
        plan = self.plans[index * END_BYTES : (index + 1) * END_BYTES]
        return plan if any(plan) else b""


class RoundsLost(PeerMessage, frozen=True):
    """The sender went on without most others and has taken over their state: so much of its work is lost."""

    rounds: Annotated[int, Meta(ge=1, le=MOST_ENDS)]
    tokens: Annotated[int, Meta(ge=0, le=1 << 62)]


# The first message on a stream, and the answer to it


class OpenParts(PeerMessage, frozen=True):
    """The opener's encoded parts follow; the mean of the reducer's range comes back."""

    sequence: Sequence
    authority: Authority


class OpenMean(PeerMessage, frozen=True):
    """The encoded mean of a round that has ended comes back: its size in eight bytes, then frames."""

    sequence: Sequence


class OpenState(PeerMessage, frozen=True):
    """The global state comes back, after StateHead."""


class StateHead(PeerMessage, frozen=True):
    """What follows on the stream: a state, its size and its digest."""

    numbers: dict[Text, int]
    layout_digest: Text
    note: bytes
    size: Annotated[int, Meta(ge=0, le=1 << 42)]
    digest: Sha256
    """What all members have alike of this state (audit/witnesses.py)."""

    def __post_init__(self) -> None:
        if "sequence" not in self.numbers:
            raise Malformed("the numbers of a state lack 'sequence'")
        try:
            read_note(self.note)
        except MalformedNote as problem:
            raise Malformed(str(problem)) from None


class OpenFile(PeerMessage, frozen=True):
    """A file comes back, after FileHead."""

    name: Text


class FileHead(PeerMessage, frozen=True):
    """What follows on the stream: a file, its size and its SHA-256."""

    size: Annotated[int, Meta(ge=0, le=_LARGEST_FILE)]
    digest: Text


class NotHere(PeerMessage, frozen=True):
    """The asked peer does not have it, or no longer."""


# Questions of guests (`diloco join`, `status` and `doctor`), and the answers

MAX_MEASURED_BYTES = 512 << 10


class AskStatus(PeerMessage, frozen=True):
    """Asks for the state of the run and of its members."""


class StatusAnswer(PeerMessage, frozen=True):
    """The run as the asked member sees it."""

    status: RunStatus


class AskFiles(PeerMessage, frozen=True):
    """Asks for the names of the files that the receiver serves."""


class FileNames(PeerMessage, frozen=True):
    """The names of files, for OpenFile."""

    names: Annotated[tuple[Text, ...], Meta(max_length=8192)]


class AskTime(PeerMessage, frozen=True):
    """Asks for the time of the receiver's machine."""


class Time(PeerMessage, frozen=True):
    """The answer to AskTime, in seconds since 1970."""

    time: float


class Measure(PeerMessage, frozen=True):
    """A test of the bandwidth in both directions: `size` bytes come back."""

    size: Annotated[int, Meta(ge=0, le=MAX_MEASURED_BYTES)]
    padding: Annotated[bytes, Meta(max_length=MAX_MEASURED_BYTES)] = b""


class Measured(PeerMessage, frozen=True):
    """The answer to Measure: as many bytes as it asks for."""

    data: bytes


# How members check each other


class Projections(PeerMessage, frozen=True):
    """The numbers of the sender's parts, from `first` on (audit/mean_check.py)."""

    plan: Sha256
    first: Annotated[int, Meta(ge=0, le=1 << 40)]
    values: Annotated[bytes, Meta(max_length=1 << 19)]

    def __post_init__(self) -> None:
        if len(self.values) % 4:
            raise Malformed(f"{len(self.values)} bytes of numbers")


class AskPart(PeerMessage, frozen=True):
    """A member checks a mean, and wants to see a part of the receiver's contribution to it."""

    plan: Sha256
    part: Annotated[int, Meta(ge=0, le=1 << 40)]


class Part(PeerMessage, frozen=True):
    """A part of the sender's contribution, encoded, and the proof that it was bound to it."""

    data: bytes
    proof: Annotated[bytes, Meta(max_length=4096)]


class Proof(PeerMessage, frozen=True):
    """A member has lied, as every other can check."""

    lie: TwoRanges | LongParts | TwoPlans


# States of members


class AskStateDigest(PeerMessage, frozen=True):
    """A worker that fetches the state before this round asks other members for theirs."""

    sequence: Annotated[int, Meta(ge=0, le=1 << 62)]


class StateDigest(PeerMessage, frozen=True):
    """The digest of the sender's state; None if it does not have that one."""

    digest: Sha256 | None = None
    pending: bool = False
    """The sender is computing the digest: ask again."""


Message = (
    Hello | Addressed | Beat | AskNumber | Number | Goodbye | Done
    | Ready | Waiting | Ended | NotLeader | Complete | Trouble | Opposed
    | Plan | Commit | Inquire | Posted | LedBy | NotPosted | Superseded | PostNow
    | AskOutcome | AskLastPlan | Outcome | AskEnds | Ends | RoundsLost | AskStatus | StatusAnswer
    | AskFiles | FileNames | AskTime | Time | Measure | Measured
    | Proof | Projections | AskPart | Part | AskStateDigest | StateDigest
    | OpenParts | OpenMean | OpenState | StateHead | OpenFile | FileHead | NotHere
)  # fmt: skip

ANSWERS: dict[type[PeerMessage], tuple[type[PeerMessage], ...]] = {
    Hello: (Hello,),
    Beat: (Beat,),
    AskNumber: (Number,),
    Goodbye: (Done,),
    Ready: (Waiting, Ended, NotLeader),
    Inquire: (Posted, NotPosted, LedBy, Superseded, Ended),
    PostNow: (Done,),
    Plan: (Done, NotPosted, Superseded, Ended),
    Complete: (Done,),
    Trouble: (Done,),
    Opposed: (Done,),
    Commit: (Done, NotPosted, Superseded),
    AskOutcome: (Outcome,),
    AskLastPlan: (Outcome,),
    AskEnds: (Ends,),
    RoundsLost: (Done,),
    Projections: (Done,),
    AskPart: (Part, NotHere),
    Proof: (Done,),
    AskStateDigest: (StateDigest,),
    OpenParts: (),
    OpenMean: (),
    OpenState: (StateHead, NotHere),
    OpenFile: (FileHead, NotHere),
    AskStatus: (StatusAnswer,),
    AskFiles: (FileNames,),
    AskTime: (Time,),
    Measure: (Measured,),
}
"""What each request is answered with, unless it is refused (refusals.py). Data follows those that open a stream."""

_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)
_version_decoder = msgspec.msgpack.Decoder(HelloVersion)


def decode(data: bytes) -> Message:
    """Raises Malformed."""
    if len(data) > MAX_CALL_BYTES:
        raise Malformed(f"{len(data)} bytes, more than {MAX_CALL_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a message: {error}") from error


def expect(data: bytes, type_: type[T]) -> T:
    """Decode an answer of this type; raises Malformed."""
    message = decode(data)
    if not isinstance(message, type_):
        raise Malformed(f"{type(message).__name__} instead of {type_.__name__}")
    return message


def hello_version(data: bytes) -> HelloVersion | None:
    """Read the version that a Hello of any version names; None if the data is no Hello."""
    try:
        return _version_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
