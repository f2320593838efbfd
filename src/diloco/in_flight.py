"""Rounds that are posted and not yet merged, and how they are saved.

A round in flight when a worker is saved ends as it would have ended: its result is waited for, and kept unmerged. The
mean is saved as the fp32 values that it decodes to, by parameter, so that neither the codec's parts nor the number of
ranks matter to whoever goes on; merging it later gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import Fragment
from diloco.engines.base import PendingRound
from diloco.engines.rounds import Member, Report, RoundKey, RoundResult
from diloco.errors import RoundFailed
from diloco.held import Held, Numbers
from diloco.outer_state import OuterState


@dataclass(frozen=True)
class Posted:
    """A round in flight."""

    key: RoundKey
    at_step: int
    norm: float
    pending: PendingRound


class Settled(PendingRound):
    """A round whose outcome is known."""

    def __init__(self, outcome: RoundResult | RoundFailed) -> None:
        self.outcome = outcome

    def wait(self) -> RoundResult:
        if isinstance(self.outcome, RoundFailed):
            raise self.outcome
        return self.outcome


def settle(posted: Posted) -> Posted:
    """Wait for the round's outcome without merging it."""
    if isinstance(posted.pending, Settled):
        return posted
    try:
        return replace(posted, pending=Settled(posted.pending.wait()))
    except RoundFailed as failure:
        return replace(posted, pending=Settled(failure))


def outcome(posted: Posted) -> RoundResult | RoundFailed:
    """Of a settled round."""
    assert isinstance(posted.pending, Settled)
    return posted.pending.outcome


def saved_rounds(rounds: Sequence[Posted], state: OuterState) -> tuple[dict[str, Held], list[Numbers]]:
    """Settled rounds as tensors and numbers."""
    held: dict[str, Held] = {}
    numbers = [_to_numbers(posted) for posted in rounds]
    for posted, told in zip(rounds, numbers, strict=True):
        if _has_mean(told):
            held |= _held_mean(posted.key, _decoded_mean(posted, state.fragments[posted.key.fragment]), state)
    return held, numbers


def restoring_rounds(
    numbers: Sequence[Numbers], state: OuterState
) -> tuple[dict[str, Held], Callable[[], list[Posted]]]:
    """The memory to load the rounds' means into, and what then gives the rounds."""
    held: dict[str, Held] = {}
    means: list[Tensor | None] = []
    for saved in numbers:
        key = RoundKey(**saved["key"])
        mean = torch.empty_like(state.fragments[key.fragment].anchor) if _has_mean(saved) else None
        means.append(mean)
        held |= _held_mean(key, mean, state) if mean is not None else {}

    def rounds() -> list[Posted]:
        fragments = [state.fragments[saved["key"]["fragment"]] for saved in numbers]
        return [_from_numbers(*args) for args in zip(numbers, fragments, means, strict=True)]

    return held, rounds


def _held_mean(key: RoundKey, mean: Tensor, state: OuterState) -> dict[str, Held]:
    return state.held_of(key.fragment, f"in_flight.{key.sequence}", mean)


def _has_mean(numbers: Mapping[str, Any]) -> bool:
    return numbers["result"] is not None and numbers["result"]["total_weight"] > 0


@torch.no_grad()
def _decoded_mean(posted: Posted, fragment: Fragment) -> Tensor:
    """The mean of a settled round in fp32, flat."""
    result = posted.pending.wait()
    flat = torch.empty_like(fragment.anchor)
    for span in fragment.spans():
        flat[span.slice].copy_(result.mean.decode(span.first_part, span.num_parts))
    return flat


def _to_numbers(posted: Posted) -> Numbers:
    """All of a settled round but its mean."""
    numbers: Numbers = {"key": asdict(posted.key), "at_step": posted.at_step, "norm": posted.norm}
    ended = outcome(posted)
    if isinstance(ended, RoundFailed):
        return numbers | {"result": None, "failure": ended.reason, "resync": ended.resync}
    result = {name: getattr(ended, name) for name in _RESULT_NUMBERS}
    result |= {"contributors": list(ended.contributors), "refused": {str(w): r for w, r in ended.refused.items()}}
    result["members"] = [asdict(member) for member in ended.members]
    return numbers | {"result": result, "failure": None}


_RESULT_NUMBERS = ("total_weight", "bytes_sent", "bytes_received", "seconds", "resync")


def _from_numbers(numbers: Mapping[str, Any], fragment: Fragment, mean: Tensor | None) -> Posted:
    """The round again, settled; `mean` is what it decoded to. Whoever stopped then does not stop now."""
    key = RoundKey(**numbers["key"])
    if numbers["result"] is None:
        ended: RoundResult | RoundFailed = RoundFailed(numbers["failure"], resync=numbers["resync"])
    else:
        ended = _result(numbers["result"], fragment, mean)
    return Posted(key, numbers["at_step"], numbers["norm"], Settled(ended))


def _result(saved: Mapping[str, Any], fragment: Fragment, mean: Tensor | None) -> RoundResult:
    vector = EncodedVector(codec("fp32"), fragment.layout, fragment.anchor.device)
    if mean is not None:
        vector.encode(0, mean)
    members = [member | {"report": Report(**member["report"] | {"stopping": False})} for member in saved["members"]]
    return RoundResult(
        mean=vector,
        contributors=tuple(saved["contributors"]),
        refused={int(worker): reason for worker, reason in saved["refused"].items()},
        members=tuple(Member(**member) for member in members),
        **{name: saved[name] for name in _RESULT_NUMBERS},
    )
