"""The note of a swarm's worker: what it tells the other trainers beside a contribution or a state.

A note comes from another machine, so it has one form and one reader: fixed fields, each with its bounds, and a length
that follows from its three counts. `read_note` accepts that and nothing else. A node reads the note of every
contribution before it counts (swarm/protocol/plan.py): a note that cannot be read is an offence of its author.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan

_MAGIC = b"dln2"
_HEAD = struct.Struct("<4s qdq q HHH")
_SHARD = struct.Struct("<Iqq")
_NUMBER = struct.Struct("<I")
_TOKENS = struct.Struct("<Iq")

MAX_NOTE_BYTES = 1 << 14
MOST_SHARDS = 256
"""Shards left out of a note are read from their last known position."""
MOST_APART = 256
MOST_COUNTED = 256
"""Workers whose tokens a note tells."""
_MOST_COUNT = 1 << 53
_MOST_NUMBER = 1 << 20
"""The highest worker number (as in the swarm's status)."""
MOST_LOSS = 1e6
"""Nats a token. A model that knows nothing has a loss of the logarithm of its vocabulary, below 20."""


class MalformedNote(ValueError):
    """A note that no honest worker of this version writes."""


@dataclass(frozen=True)
class ValidationFigure:
    """The validation loss of the anchor at a step, over all of the validation text."""

    step: int
    loss: float
    """nan where it is not finite."""
    tokens: int


@dataclass(frozen=True)
class Note:
    """All that a note says; each field may be empty."""

    read: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Shard -> the epoch that its reader is in, and the windows of it that have been read."""
    apart: frozenset[int] = frozenset()
    """The numbers of workers with their own text."""
    validation: ValidationFigure | None = None
    """The latest figure that the worker knows."""
    own_tokens: int = 0
    """The tokens that the worker has trained on, in all its starts as far as they are in the run."""
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Worker -> its tokens that are in the run's means, as far as the author knows (training/swarm/token_counts.py)."""


def is_loss(value: float) -> bool:
    """Whether a worker may report this loss: nan, or a finite number that a cross entropy can be."""
    return isnan(value) or 0 <= value <= MOST_LOSS


def write_note(note: Note) -> bytes:
    """Write a note: the first MOST_SHARDS shards and MOST_COUNTED counts, and the lowest MOST_APART numbers.

    A loss that `is_loss` forbids becomes nan, and a count of tokens has a bound: what another member told this worker
    of its tokens must not make its own notes malformed.
    """
    read = list(note.read.items())[:MOST_SHARDS]
    apart = sorted(number for number in note.apart if 0 <= number <= _MOST_NUMBER)[:MOST_APART]
    counted = list(note.tokens.items())[:MOST_COUNTED]
    figure = note.validation or ValidationFigure(-1, nan, 0)
    loss = figure.loss if is_loss(figure.loss) else nan
    own_tokens = min(note.own_tokens, _MOST_COUNT)
    return b"".join(
        [
            _HEAD.pack(_MAGIC, figure.step, loss, figure.tokens, own_tokens, len(read), len(apart), len(counted)),
            *(_SHARD.pack(shard, *position) for shard, position in read),
            *(_NUMBER.pack(number) for number in apart),
            *(_TOKENS.pack(worker, min(tokens, _MOST_COUNT)) for worker, tokens in counted),
        ]
    )


def read_note(data: bytes) -> Note:
    """Read a note. Raises MalformedNote, and no other exception, whatever the bytes are; no bytes are an empty note."""
    if not data:
        return Note()
    if len(data) > MAX_NOTE_BYTES:
        raise MalformedNote(f"a note of {len(data)} bytes, more than {MAX_NOTE_BYTES}")
    if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
        raise MalformedNote(f"a note that does not begin with {_MAGIC!r} and {_HEAD.size} bytes of numbers")
    _, step, loss, tokens, own_tokens, shards, apart, counted = _HEAD.unpack_from(data)
    end_of_shards = _HEAD.size + shards * _SHARD.size
    end_of_apart = end_of_shards + apart * _NUMBER.size
    too_many = shards > MOST_SHARDS or apart > MOST_APART or counted > MOST_COUNTED
    if too_many or len(data) != end_of_apart + counted * _TOKENS.size:
        raise MalformedNote(f"a note of {len(data)} bytes with {shards} shards, {apart} workers and {counted} counts")
    read = {shard: (epoch, consumed) for shard, epoch, consumed in _SHARD.iter_unpack(data[_HEAD.size : end_of_shards])}
    numbers = [number for (number,) in _NUMBER.iter_unpack(data[end_of_shards:end_of_apart])]
    if any(not 0 <= count <= _MOST_COUNT for position in read.values() for count in position):
        raise MalformedNote("a note with a position in the text that no shard has")
    counts = dict(_TOKENS.iter_unpack(data[end_of_apart:]))
    highest = max([*numbers, *counts], default=0)
    if highest > _MOST_NUMBER:
        raise MalformedNote(f"a note with worker {highest}, above {_MOST_NUMBER}")
    if any(not 0 <= count <= _MOST_COUNT for count in (own_tokens, *counts.values())):
        raise MalformedNote("a note with tokens that no worker has trained on")
    return Note(read, frozenset(numbers), _figure(step, loss, tokens), own_tokens, counts)


def _figure(step: int, loss: float, tokens: int) -> ValidationFigure | None:
    if step == -1:
        return None
    if not 0 <= step <= _MOST_COUNT or not 0 < tokens <= _MOST_COUNT or not is_loss(loss):
        raise MalformedNote(f"a note with a validation loss of {loss} over {tokens} tokens at step {step}")
    return ValidationFigure(step, loss, tokens)
