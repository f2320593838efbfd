"""The events of a run: a frozen class for each type of line in events.jsonl, with its fields.

    StepEvent(step=10, loss=3.2, …)    ── to_line ──►    {"v": 1, "time": …, "worker": 0, "type": "step", "step": 10, …}
                                       ◄── read_event ──

A field whose default is given may be missing in a line: an earlier version did not write it. What a later version
writes is kept: fields that are not known here are in `extra`, and an event of another type is an UnknownEvent. An event
whose fields are not what its class says is an UnknownEvent too, with the `problem`. docs/events.md says what the types
and fields mean.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

EVENTS_VERSION = 1
LARGEST = 1 << 60
"""The largest number that a reader accepts: a larger one is damaged or made up."""
_EVERY_LINE = ("v", "time", "worker", "type")
_EVERY_EVENT = ("time", "worker", "extra")
"""The fields of Event: those that are not of an event's own type."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The fields of every event. The log sets `time` and `worker` when it writes one."""

    type: ClassVar[str] = ""
    time: float = 0.0
    """Seconds since 1970."""
    worker: int = -1
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The fields of a later version, as they were read."""


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a type that this version does not know, or whose fields are not those of its type."""

    name: str
    """The type as it was read."""
    problem: str | None = None
    """What is wrong with its fields; None if the type is unknown."""


E = TypeVar("E", bound=Event)
Emit = Callable[[Event], None]
"""Writes an event into a log."""
EVENT_TYPES: dict[str, type[Event]] = {}
"""Every event class by the `type` of its lines."""


def _event(type_: str) -> Callable[[type[E]], type[E]]:
    def register(kind: type[E]) -> type[E]:
        kind.type = type_
        EVENT_TYPES[type_] = kind
        return kind

    return register


@dataclass(frozen=True)
class RoundStatistic:
    """How every reader of a run shows a number of a round as a whole; ROUND_STATISTICS has them by their field."""

    label: str
    """The words before its number."""
    meaning: str
    """What it is, as the title of a figure has it."""
    format: str
    """The format of its number in texts."""
    unit: str = ""
    of_each_worker: bool = False
    """Every worker measures its own number; the round has that of the last worker that told it."""
    brief: bool = True
    """The number is shown where there is place for few: in the live display and the end report."""

    def text(self, value: float) -> str:
        """Return the number with its words."""
        return f"{self.label} {value:{self.format}}{self.unit and ' '}{self.unit}"


def _statistic(label: str, meaning: str, format: str, **more: Any) -> Any:
    """Declare a field for a number of the round as a whole, which is then in ROUND_STATISTICS; None if unknown."""
    return field(default=None, metadata={"statistic": RoundStatistic(label, meaning, format, **more)})


def _sometimes(default: Any = None) -> Any:
    """Declare a field that is written only where it has another value than the default."""
    return field(default=default, metadata={"sometimes": True})


# The start of a run


@_event("sizes")
@dataclass(frozen=True, kw_only=True)
class SizesEvent(Event):
    """The estimated sizes of the run, told by the first worker of a machine."""

    process_bytes: int = 0
    warnings: Sequence[str] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    device_memory: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, Any] = field(default_factory=dict)
    disk_peak_bytes: int = 0
    round_bytes: int = 0
    round_steps: int = 0
    round_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The estimate as `diloco train --estimate --json` has it."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _EVERY_EVENT} | dict(
            self.extra
        )


@_event("micro_batches")
@dataclass(frozen=True, kw_only=True)
class MicroBatchesEvent(Event):
    """The micro-batches of a step on a GPU, where `training.accumulation` is left open."""

    accumulation: int
    rows: int
    tried: bool
    budget_bytes: float | None = None


@_event("worker_started")
@dataclass(frozen=True, kw_only=True)
class WorkerStartedEvent(Event):
    """A worker has its model and its text, and begins."""

    workers: int = 0
    ranks: int | None = None
    device: str | None = None
    precision: str | None = None
    parameters: int = 0
    trainable_parameters: int = 0
    threads: int | None = None
    tokens_per_step: int = 0
    unigram_perplexity: float | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)


@_event("corpus")
@dataclass(frozen=True, kw_only=True)
class CorpusEvent(Event):
    """The text that is trained on."""

    partition: str = ""
    documents: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    shard_tokens: Sequence[int] = ()
    validation_tokens: int = 0
    purity: Mapping[str, float] = field(default_factory=dict)
    overall_purity: float | None = None
    learnt_tokens: int | None = _sometimes()
    label_shards: Mapping[str, int] | None = _sometimes()


@_event("starting")
@dataclass(frozen=True, kw_only=True)
class StartingEvent(Event):
    """A worker is about to take its first step; `doing` says what that step waits for."""

    doing: str


@_event("first_step")
@dataclass(frozen=True, kw_only=True)
class FirstStepEvent(Event):
    """The first inner step of this start has ended."""

    seconds: float


@_event("resumed")
@dataclass(frozen=True, kw_only=True)
class ResumedEvent(Event):
    """A worker goes on from a checkpoint; `workers` is 0 in a swarm."""

    step: int
    rounds: int = 0
    workers: int = 0
    workers_before: int | None = None
    steps_before: int | None = None
    new: bool = False
    notes: Sequence[str] = ()


# Steps, rounds, validation


@_event("step")
@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """A logged inner step; its counters are of before the round that is due at that step."""

    step: int
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    tokens: int | None = None
    elapsed_seconds: float | None = None
    sync_seconds: float | None = None
    bytes_sent: int | None = None
    rounds: int | None = None


@_event("round_posted")
@dataclass(frozen=True, kw_only=True)
class RoundPostedEvent(Event):
    """A worker has given its outer gradient to the engine."""

    sequence: int
    fragment: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """The counters that a worker reports to the others with a round."""

    inner_steps: int | None = None
    tokens: int | None = None
    bytes_sent: int | None = None
    elapsed_seconds: float | None = None
    sync_seconds: float | None = None
    loss: float | None = None
    last_round_seconds: Sequence[Any] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundMember:
    """A worker as the others heard of it in a round."""

    worker: int
    anchor_digest: str = ""
    weight: float | None = None
    norm: float | None = None
    report: MemberReport = field(default_factory=MemberReport)
    extra: Mapping[str, Any] = field(default_factory=dict)


@_event("round")
@dataclass(frozen=True, kw_only=True)
class RoundEndedEvent(Event):
    """A round as one worker saw its end."""

    sequence: int
    fragment: int = 0
    step: int = 0
    seconds: float | None = _statistic("took", "Seconds that a round took", ".2f", unit="s")
    similarity: float | None = _statistic("similarity", "Mean cosine of the workers' outer gradients", ".2f")
    codec_error: float | None = _statistic(
        "codec error", "Share of an outer gradient that the codec lost", ".2g", of_each_worker=True
    )
    mean_norm: float | None = _statistic("norm of the mean", "Norm of the mean outer gradient", ".3g", brief=False)
    norm: float | None = None
    cosines: Sequence[Any] = ()
    agreement: Mapping[str, float] = field(default_factory=dict)
    disagreeing: Sequence[int] = ()
    encode_seconds: float | None = None
    flight_seconds: float | None = None
    waited_seconds: float | None = None
    merge_seconds: float | None = None
    others_seconds: float | None = None
    send_seconds: float | None = None
    reduce_seconds: float | None = None
    failure: str | None = None
    dropped: bool = False
    contributors: Sequence[int] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    merge: str | None = None
    clipped: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
    members: Sequence[RoundMember] = ()
    roster: Sequence[int] = ()
    signatures: int = 0
    mean_digest: str | None = None


ROUND_STATISTICS: Mapping[str, RoundStatistic] = {
    each.name: each.metadata["statistic"] for each in fields(RoundEndedEvent) if "statistic" in each.metadata
}
"""The numbers of a round as a whole, in the order in which they are shown."""


@_event("evaluation")
@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """A worker has measured its share of the validation windows."""

    step: int
    loss: float | None = None
    tokens: int = 0


@_event("validation")
@dataclass(frozen=True, kw_only=True)
class ValidationEvent(Event):
    """The loss of all shares together."""

    step: int
    loss: float | None = None
    perplexity: float | None = None
    tokens: int = 0
    measured_by: Sequence[int] | None = _sometimes()
    told_by: Sequence[int] | None = _sometimes()
    doubtful: Mapping[str, float] | None = _sometimes()
    withheld: Sequence[int] | None = _sometimes()


@_event("loss_not_finite")
@dataclass(frozen=True, kw_only=True)
class LossNotFiniteEvent(Event):
    """A worker ends since its loss is no number."""

    step: int
    loss: str
    learning_rate: float | None = None
    last_loss: float | None = None


# Files


@_event("checkpoint")
@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A complete checkpoint is on the disk."""

    step: int
    rounds: int = 0
    bytes: int = 0
    seconds: float | None = None


@_event("checkpoint_failed")
@dataclass(frozen=True, kw_only=True)
class CheckpointFailedEvent(Event):
    """A checkpoint could not be written."""

    step: int
    reason: str = ""


@_event("checkpoint_skipped")
@dataclass(frozen=True, kw_only=True)
class CheckpointSkippedEvent(Event):
    """A checkpoint was left out."""

    step: int
    reason: str = ""


@_event("events_delayed")
@dataclass(frozen=True, kw_only=True)
class EventsDelayedEvent(Event):
    """Events could not be written for some time, and came late."""

    events: int
    reason: str
    seconds: float


@_event("model_failed")
@dataclass(frozen=True, kw_only=True)
class ModelFailedEvent(Event):
    """The model could not be written at the end."""

    step: int
    reason: str = ""


@_event("sample")
@dataclass(frozen=True, kw_only=True)
class SampleEvent(Event):
    """A text that the model wrote."""

    step: int = 0
    prompt: str = ""
    text: str = ""


@_event("sample_skipped")
@dataclass(frozen=True, kw_only=True)
class SampleSkippedEvent(Event):
    """The model could not write a text."""

    step: int = 0
    reason: str = ""


# The end


@dataclass(frozen=True, kw_only=True)
class WorkerEndedEvent(Event):
    """The last counts of a worker."""

    inner_steps: int
    stopped_early: bool = False
    rounds: int = 0
    rounds_failed: int = 0
    rounds_dropped: int = 0
    contributions_refused: int = 0
    skipped_steps: int = 0
    bytes_sent: int | None = None
    sync_seconds: float | None = None
    anchor_digest: str | None = None
    confirmed: Sequence[RoundMember] = ()
    resyncs: int = 0
    tokens_by_worker: Mapping[str, int] | None = None
    checkpoints_failed: int = 0
    tokens: int | None = None
    elapsed_seconds: float | None = None
    members: Sequence[RoundMember] = ()
    error: str | None = _sometimes()


@_event("worker_finished")
@dataclass(frozen=True, kw_only=True)
class WorkerFinishedEvent(WorkerEndedEvent):
    """A worker has come to the end, or to a stop."""


@_event("worker_failed")
@dataclass(frozen=True, kw_only=True)
class WorkerFailedEvent(WorkerEndedEvent):
    """A worker has ended with an error."""


# A swarm


@_event("swarm")
@dataclass(frozen=True, kw_only=True)
class SwarmEvent(Event):
    """This worker can be reached in the swarm."""

    name: str = ""
    founded: bool = False
    going_on: bool = False
    run: str = ""
    peer: str = ""
    addresses: Sequence[str] = ()


@_event("threads")
@dataclass(frozen=True, kw_only=True)
class ThreadsEvent(Event):
    """This worker's CPU threads, now that so many workers share the machine."""

    threads: int
    cores: int
    workers: int


@_event("warm_start")
@dataclass(frozen=True, kw_only=True)
class WarmStartEvent(Event):
    """This worker waits for the end of the warm start."""

    step: int
    steps: int


@_event("waiting")
@dataclass(frozen=True, kw_only=True)
class WaitingEvent(Event):
    """Training waits for more workers."""

    present: int
    wanted: int


@_event("joined")
@dataclass(frozen=True, kw_only=True)
class JoinedEvent(Event):
    """This worker starts from the others' state."""

    step: int
    rounds: int = 0


@_event("state_arriving")
@dataclass(frozen=True, kw_only=True)
class StateArrivingEvent(Event):
    """A part of the others' state has come."""

    received_bytes: int
    all_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemberEvent(Event):
    """An event about one member of the swarm."""

    member: int
    peer: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class MemberReasonEvent(MemberEvent):
    """An event about one member of the swarm, with the reason."""

    reason: str = ""


@_event("member_joined")
@dataclass(frozen=True, kw_only=True)
class MemberJoinedEvent(MemberEvent):
    """A member has joined; with `already` it was there before this worker."""

    already: bool = _sometimes(False)


@_event("member_left")
@dataclass(frozen=True, kw_only=True)
class MemberLeftEvent(MemberEvent):
    """A member has left."""


@_event("member_lost")
@dataclass(frozen=True, kw_only=True)
class MemberLostEvent(MemberReasonEvent):
    """A member no longer answers."""


@_event("member_banned")
@dataclass(frozen=True, kw_only=True)
class MemberBannedEvent(MemberReasonEvent):
    """A member is banned."""


@_event("member_expelled")
@dataclass(frozen=True, kw_only=True)
class MemberExpelledEvent(MemberReasonEvent):
    """A member was excluded."""


@_event("leader_passed_over")
@dataclass(frozen=True, kw_only=True)
class LeaderPassedOverEvent(MemberEvent):
    """A leader did not go on with a round."""

    round: int


@_event("reducer_passed_over")
@dataclass(frozen=True, kw_only=True)
class ReducerPassedOverEvent(MemberEvent):
    """A member did not send the mean of its parts."""

    round: int


@_event("state_refused")
@dataclass(frozen=True, kw_only=True)
class StateRefusedEvent(MemberReasonEvent):
    """The state of a member is not taken over."""


@_event("rounds_lost")
@dataclass(frozen=True, kw_only=True)
class RoundsLostEvent(MemberEvent):
    """A member that went on without most others has taken over their state."""

    rounds: int
    tokens: int


@_event("tokens_doubted")
@dataclass(frozen=True, kw_only=True)
class TokensDoubtedEvent(Event):
    """A member tells more tokens than all steps so far have."""

    member: int
    round: int
    tokens: int
    most: int


@_event("malformed_post")
@dataclass(frozen=True, kw_only=True)
class MalformedPostEvent(Event):
    """A member's post in a bucket cannot be read, and is in no plan of this worker."""

    member: int
    round: int
    reason: str = ""


@_event("false_range")
@dataclass(frozen=True, kw_only=True)
class FalseRangeEvent(Event):
    """A range of a mean in a bucket is wrong; this worker has computed it anew."""

    round: int
    range: int
    reason: str = ""
    member: int | None = None


@_event("unusable_data")
@dataclass(frozen=True, kw_only=True)
class UnusableDataEvent(Event):
    """A member's contribution is not in the bucket as it has posted it."""

    member: int
    round: int
    told_by: int


@_event("check_failed")
@dataclass(frozen=True, kw_only=True)
class CheckFailedEvent(Event):
    """The worker could not check a mean."""

    round: int
    reason: str = ""


@_event("internal_error")
@dataclass(frozen=True, kw_only=True)
class InternalErrorEvent(Event):
    """A fault of the worker's own program or machine."""

    what: str
    reason: str = ""


@_event("excluded")
@dataclass(frozen=True, kw_only=True)
class ExcludedEvent(Event):
    """The swarm has revoked or banned this worker."""

    reason: str = ""
    member: int | None = None


@_event("alone")
@dataclass(frozen=True, kw_only=True)
class AloneEvent(Event):
    """No other member answers."""

    member: int | None = None


@_event("minority")
@dataclass(frozen=True, kw_only=True)
class MinorityEvent(Event):
    """Most members of the last round are silent."""

    here: int
    members: int
    member: int | None = None


@_event("called")
@dataclass(frozen=True, kw_only=True)
class CalledEvent(Event):
    """This worker was slow, and posted the work that it had."""

    sequence: int
    step: int = 0


@_event("renumbered")
@dataclass(frozen=True, kw_only=True)
class RenumberedEvent(Event):
    """This worker has another number from now on."""

    before: int
    member: int = -1
    peer: str = ""


@_event("diverged")
@dataclass(frozen=True, kw_only=True)
class DivergedEvent(Event):
    """This worker went on without the others, and has taken over their state."""

    member: int | None = None
    rounds: int | None = _sometimes()
    tokens: int | None = _sometimes()


@_event("two_means")
@dataclass(frozen=True, kw_only=True)
class TwoMeansEvent(Event):
    """A round has ended in two ways."""

    round: int
    leaders: Sequence[int]


@_event("resync")
@dataclass(frozen=True, kw_only=True)
class ResyncEvent(Event):
    """This worker has fetched the others' state."""

    step: int
    reason: str = ""
    sequence: int = 0


@dataclass(frozen=True, kw_only=True)
class ListedMember:
    """A member in a list of all."""

    member: int
    where: str = ""
    step: float | None = None
    loss: float | None = None
    contributed: float | None = None
    state: str = ""
    tokens: float | None = None
    step_seconds: float | None = None
    latency_seconds: float | None = None
    silent_seconds: float | None = None
    link: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@_event("members")
@dataclass(frozen=True, kw_only=True)
class MembersEvent(Event):
    """All members, every ten seconds."""

    present: Sequence[ListedMember] = ()
    run_tokens: int | None = None
    """The tokens of all workers in the run's means, as this worker counts them."""


@_event("shards")
@dataclass(frozen=True, kw_only=True)
class ShardsEvent(Event):
    """The shards that this worker reads from now on."""

    shards: Sequence[int] = ()


@_event("shard_fetched")
@dataclass(frozen=True, kw_only=True)
class ShardFetchedEvent(Event):
    """A shard of the text has come."""

    shard: int


@_event("shards_not_fetched")
@dataclass(frozen=True, kw_only=True)
class ShardsNotFetchedEvent(Event):
    """Shards of the text could not be fetched."""

    shards: Sequence[int] = ()
    reason: str = ""


@_event("sidecar_lost")
@dataclass(frozen=True, kw_only=True)
class SidecarLostEvent(Event):
    """The worker's network process died."""

    reason: str = ""
    log: str = ""


@_event("sidecar_restarted")
@dataclass(frozen=True, kw_only=True)
class SidecarRestartedEvent(Event):
    """The worker's network process runs again."""

    restarts: int = 0


# Writing


def make_event(type_: str, given: Mapping[str, Any]) -> Event:
    """Make an event whose type is given by its name; ValueError if the type has no such fields."""
    event = read_event({"time": 0.0, "worker": -1, "type": type_} | dict(given))
    if isinstance(event, UnknownEvent):
        raise ValueError(f"no event {type_!r} can be made of {dict(given)!r:.200}: {event.problem or 'unknown type'}")
    return event


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of the event's own type, as JSON has them: nan and inf, which it does not know, are null."""
    own: dict[str, Any] = {}
    for each in fields(event):
        value = getattr(event, each.name)
        if each.name in _EVERY_EVENT or ("sometimes" in each.metadata and value == each.default):
            continue
        own[each.name] = _plain(value)
    return own | {name: _plain(value) for name, value in event.extra.items()}


def _plain(value: object) -> object:
    """Return a value as JSON has it: lists and tables instead of tuples and dataclasses."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        known = {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.name != "extra"}
        return known | {name: _plain(item) for name, item in getattr(value, "extra", {}).items()}
    return value


# Reading


def read_event(line: Mapping[str, Any]) -> Event:
    """Return the event of a line that has `type`, `worker` and `time` (log.py); it never fails."""
    name = line["type"]
    kind = EVENT_TYPES.get(name)
    problem = None
    if kind is not None:
        try:
            return _read(kind, line)
        except ValueError as error:
            problem = str(error)
    rest = {key: value for key, value in line.items() if key not in _EVERY_LINE}
    return UnknownEvent(time=line["time"], worker=line["worker"], name=name, problem=problem, extra=rest)


def _read(kind: type[E], line: Mapping[str, Any]) -> E:
    values = _values(kind, line)
    values["time"] = line["time"]
    values["worker"] = line["worker"]
    event = kind.__new__(kind)
    event.__dict__.update(values)  # as the generated __init__ does, which is several times as slow
    return event


def _values(kind: Any, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a class's fields; raise ValueError if a line does not have them."""
    readers = _READERS.get(kind) or _readers_of(kind)
    values: dict[str, Any] = {}
    known = 0
    for name, read, default in readers:
        if name in line:
            known += 1
            value = line[name]
            if value is None and default is not MISSING:
                values[name] = default
                continue
            try:
                values[name] = read(value)
            except ValueError as error:
                raise ValueError(f"{name} is {error}") from None
        elif default is MISSING:
            raise ValueError(f"it has no {name}")
        else:
            values[name] = default
    expected = known + sum(name in line for name in _EVERY_LINE) if issubclass(kind, Event) else known
    values["extra"] = {} if expected == len(line) else _extra(kind, line, {name for name, _, _ in readers})
    return values


def _extra(kind: Any, line: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    names = known | set(_EVERY_LINE) if issubclass(kind, Event) else known
    return {name: value for name, value in line.items() if name not in names}


_Reader = Callable[[Any], Any]
_READERS: dict[type, list[tuple[str, _Reader, Any]]] = {}


def _readers_of(kind: Any) -> list[tuple[str, _Reader, Any]]:
    """Return for each field of a class its name, its reader, and its value where a line has none."""
    hints = get_type_hints(kind)
    others = _EVERY_EVENT if issubclass(kind, Event) else ("extra",)
    own = [each for each in fields(kind) if each.name not in others]
    _READERS[kind] = [(each.name, _reader(hints[each.name]), _default(each)) for each in own]
    return _READERS[kind]


def _default(declared: "Field[Any]") -> Any:
    return declared.default_factory() if declared.default_factory is not MISSING else declared.default


def _reader(hint: Any) -> _Reader:
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, types.UnionType):
        (only,) = [arg for arg in args if arg is not type(None)]
        return {float: _number_or_none, int: _whole_or_none}.get(only) or _reader(only)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping
    if origin is not None and issubclass(origin, Sequence):
        return _list if args[0] is Any else _list_of(_reader(args[0]))
    if is_dataclass(hint):
        return lambda value: _nested(hint, value)
    plain: dict[Any, _Reader] = {int: _whole, float: _number, str: _text, bool: bool}
    return plain[hint]


def _whole(value: Any) -> int:
    if type(value) is int and -LARGEST <= value <= LARGEST:
        return value
    raise ValueError(f"{value!r:.40}, which is no count")


def _number(value: Any) -> float:
    if type(value) in (int, float) and -LARGEST <= value <= LARGEST:
        return value  # type: ignore[no-any-return]
    raise ValueError(f"{value!r:.40}, which is no number")


def _number_or_none(value: Any) -> float | None:
    """Return a number, or None for what is no number: such a gap is no reason to leave the event out."""
    return value if type(value) in (int, float) and -LARGEST <= value <= LARGEST else None


def _whole_or_none(value: Any) -> int | None:
    """Return a count, or None for what is none; a count that is too large raises, since its event is made up."""
    return _whole(value) if type(value) is int else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _list(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise ValueError(f"{value!r:.40}, which is no list")


def _list_of(read: _Reader) -> _Reader:
    return lambda value: tuple(read(item) for item in _list(value))


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{value!r:.40}, which is no table")


def _nested(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    return kind(**_values(kind, _mapping(value)))
