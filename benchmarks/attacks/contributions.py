"""Attacks by what a member contributes."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from attacks import has_begun, instead_of, node
from diloco.codecs.registry import codec
from diloco.engines import header
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.node.participant import Participant
from diloco.swarm.node.round import OwnRound
from diloco.swarm.protocol.messages import Ready
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.trainer import PostedRound, PresentWorker

_SEQUENCE, _WEIGHT, _NORM, _ROUND_WEIGHT, _LAYOUT = 1, 3, 4, 5, 8
"""Places in a header."""
_VALIDATION_LOSS = -15
_VALIDATION_TOKENS = -14


def with_fields(data: bytes, **fields: Any) -> bytes:
    """Return a header with other values at the places N, which are given as `at_N`."""
    values = list(header._FORMAT.unpack(data))
    for place, value in fields.items():
        values[int(place.removeprefix("at_"))] = value
    return header._FORMAT.pack(*values)


def _changed(
    posted: PostedRound, change: Callable[[Tensor], Tensor], claim: float | None, **fields: Any
) -> PostedRound:
    """Return a post with other values and a header that fits them; `claim`: the norm that the header says instead."""
    codec_used = codec(posted.codec)
    num_parts = posted.num_parts
    values = torch.empty(num_parts, posted.part_elements)
    codec_used.decode(
        torch.frombuffer(bytearray(posted.contribution.view), dtype=torch.uint8).view(num_parts, -1), values
    )
    values = change(values)
    encoded = torch.empty(num_parts, codec_used.part_bytes(posted.part_elements), dtype=torch.uint8)
    codec_used.encode(values, encoded)
    codec_used.decode(encoded, values)
    norm = float(torch.linalg.vector_norm(values)) if claim is None else claim
    new_header = with_fields(posted.header, **{f"at_{_NORM}": norm}, **fields)
    return structs.replace(posted, contribution=SharedMemory.copy_of(encoded.numpy().tobytes()), header=new_header)


def _tell_beside(note: bytes | None = None, **fields: Any) -> None:
    """Send another note beside an honest contribution, or other numbers in its header."""

    @instead_of(Participant, "post")
    async def post(honest: Callable[..., Any], self: Participant, posted: PostedRound) -> Any:
        if has_begun(posted.key.sequence):
            posted = structs.replace(posted, header=with_fields(posted.header, **fields), note=note or posted.note)
        return await honest(self, posted)


def note_of_5000_digits() -> None:
    _tell_beside(b'{"read":{"' + b"7" * 5000 + b'":[0,0]},"apart":[]}')


def validation_loss_of_400_digits() -> None:
    _tell_beside(b'{"read":{},"apart":[],"validation":[1,' + b"9" * 400 + b",32]}")


def false_validation_loss() -> None:
    """Its share of every measurement is a loss of 900."""
    honest = header._FORMAT.pack

    @instead_of(Participant, "post")
    async def post(posts: Callable[..., Any], self: Participant, posted: PostedRound) -> Any:
        values = list(header._FORMAT.unpack(posted.header))
        if has_begun(posted.key.sequence) and values[_VALIDATION_TOKENS]:
            values[_VALIDATION_LOSS] = 900.0
        return await posts(self, structs.replace(posted, header=honest(*values)))


def _contribute(
    change: Callable[[Tensor], Tensor],
    claim: float | None = None,
    fields: dict[str, Any] | None = None,
    when: Callable[[int], bool] = lambda _: True,
) -> None:
    @instead_of(Participant, "post")
    async def post(honest: Callable[..., Any], self: Participant, posted: PostedRound) -> Any:
        if has_begun(posted.key.sequence) and when(posted.key.sequence):
            posted = _changed(posted, change, claim, **fields or {})
        return await honest(self, posted)


def times_minus_900() -> None:
    _contribute(lambda values: -900 * values)


def heavy_and_turned() -> None:
    _contribute(lambda values: -values, None, {f"at_{_WEIGHT}": 1e18, f"at_{_ROUND_WEIGHT}": 1e18})


def not_a_number() -> None:
    _contribute(lambda values: values * float("nan"))


def more_than_claimed() -> None:
    _contribute(lambda values: 1e4 * values, claim=1e-3)


def small() -> None:
    """Honest work of a thousandth of the usual size: no lie at all."""
    _contribute(lambda values: 1e-3 * values)


def wrong_direction() -> None:
    _contribute(lambda values: -values)


def against() -> None:
    """Just inside the bound on norms."""
    _contribute(lambda values: -2.9 * values)


def against_sometimes() -> None:
    """In every second round; in the others its honest work."""
    _contribute(lambda values: -2.9 * values, when=lambda sequence: sequence % 2 == 0)


def first_ready_with_another_layout() -> None:
    """As soon as a round has ended it is the first to post the next, of another model and with another bound."""

    async def post_first(present_worker: PresentWorker) -> None:
        participant = node().participant
        for _ in range(4):
            leader = participant.members.leader()
            try:
                if leader is not None:
                    await participant.calls.ask(leader, Ready(present_worker, 1e9, "mean"))
            except (CallRefused, Unreachable):
                pass
            await asyncio.sleep(0.1)

    @instead_of(Outcomes, "succeed")
    def succeed(honest: Callable[..., None], self: Outcomes, round_: OwnRound, *arguments: Any) -> None:
        honest(self, round_, *arguments)
        if has_begun():
            fields = {f"at_{_SEQUENCE}": round_.sequence + 1, f"at_{_LAYOUT}": b"another"}
            contribution = round_.contribution
            present_worker = structs.replace(contribution, header=with_fields(contribution.header, **fields))
            _tasks.add(asyncio.create_task(post_first(present_worker)))

    _contribute(lambda values: values, None, {f"at_{_LAYOUT}": b"another"})


_tasks: set[asyncio.Task[None]] = set()
