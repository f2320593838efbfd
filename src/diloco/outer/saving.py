"""Saves rounds in flight: settled, unmerged, and with the fp32 values that their means decode to.

The values are saved by parameter, so that neither the codec's parts nor the number of ranks matter when the run goes
on; merging them later gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.rounds import Comparison, Member, Report, RoundKey, RoundResult
from diloco.errors import RoundFailed
from diloco.outer.rounds import RoundInFlight, Settled, end_of
from diloco.outer.state import OuterState
from diloco.outer.tensors.tensor_pieces import Numbers, TensorPieces


def saved_rounds(rounds: Sequence[RoundInFlight], state: OuterState) -> tuple[dict[str, TensorPieces], list[Numbers]]:
    """Settled rounds as tensors and numbers."""
    tensors: dict[str, TensorPieces] = {}
    numbers = [_to_numbers(posted) for posted in rounds]
    for posted, told in zip(rounds, numbers, strict=True):
        if _has_mean(told):
            tensors |= _mean_pieces(posted.key, _decoded_means(posted, state), state)
    return tensors, numbers


def means_taken(rounds: Sequence[RoundInFlight], worker: int) -> dict[int, Sequence[EncodedVector] | None]:
    """The means in flight that have this worker's contribution in them, by fragment; None where there is none."""
    ended = [(posted.key.fragment, end_of(posted)) for posted in rounds]
    return {index: end.means_with(worker) for index, end in ended if isinstance(end, RoundResult)}


def restored_rounds(
    numbers: Sequence[Numbers], state: OuterState
) -> tuple[dict[str, TensorPieces], Callable[[], list[RoundInFlight]]]:
    """The memory to load the rounds' means into, and what then gives the rounds."""
    tensors: dict[str, TensorPieces] = {}
    means: list[list[Tensor]] = []
    for saved in numbers:
        key = RoundKey(**saved["key"])
        mine = [fragment for _, fragment in state.fragments_of(key.fragment)]
        means.append([torch.empty_like(fragment.anchor) for fragment in mine] if _has_mean(saved) else [])
        tensors |= _mean_pieces(key, means[-1], state) if _has_mean(saved) else {}

    def rounds() -> list[RoundInFlight]:
        return [_from_numbers(saved, state, loaded) for saved, loaded in zip(numbers, means, strict=True)]

    return tensors, rounds


def _mean_pieces(key: RoundKey, means: Sequence[Tensor], state: OuterState) -> dict[str, TensorPieces]:
    return state.tensor_pieces(key.fragment, f"in_flight.{key.sequence}", means)


def _has_mean(numbers: Mapping[str, Any]) -> bool:
    return numbers["result"] is not None and numbers["result"]["total_weight"] > 0


@torch.no_grad()
def _decoded_means(posted: RoundInFlight, state: OuterState) -> list[Tensor]:
    """The means of a settled round in fp32, flat, for what this rank has of the fragment."""
    by_lane = dict(zip((lane.number for lane in state.lanes), posted.pending.wait().means, strict=True))
    decoded = []
    for lane, fragment in state.fragments_of(posted.key.fragment):
        flat = torch.empty_like(fragment.anchor)
        for span in fragment.spans():
            flat[span.slice].copy_(by_lane[lane.number].decode(span.first_part, span.num_parts))
        decoded.append(flat)
    return decoded


def _to_numbers(posted: RoundInFlight) -> Numbers:
    """All of a settled round but its mean."""
    numbers: Numbers = {name: getattr(posted, name) for name in ("at_step", "work", "norm", "dropped")}
    numbers["key"] = asdict(posted.key)
    ended = end_of(posted)
    if isinstance(ended, RoundFailed):
        return numbers | {"result": None, "failure": ended.reason, "resync": ended.resync}
    result = {name: getattr(ended, name) for name in _RESULT_NUMBERS}
    result |= {"contributors": list(ended.contributors), "refused": {str(w): r for w, r in ended.refused.items()}}
    result["clipped"] = {str(worker): reason for worker, reason in ended.clipped.items()}
    result |= {"members": [member.as_json() for member in ended.members], "roster": list(ended.roster)}
    result |= asdict(ended.comparison)
    return numbers | {"result": result, "failure": None}


_RESULT_NUMBERS = ("total_weight", "bytes_sent", "bytes_received", "seconds", "resync", "merge", "plain")


def _from_numbers(numbers: Mapping[str, Any], state: OuterState, loaded: Sequence[Tensor]) -> RoundInFlight:
    """The round again, settled; `loaded` is what its means decoded to. A worker that stopped then does not stop now."""
    key = RoundKey(**numbers["key"])
    if numbers["result"] is None:
        ended: RoundResult | RoundFailed = RoundFailed(numbers["failure"], resync=numbers["resync"])
    else:
        ended = _result(numbers["result"], _encoded_means(state, key.fragment, loaded))
    dropped = numbers.get("dropped", False)  # an earlier version saved none
    return RoundInFlight(key, numbers["at_step"], numbers["work"], Settled(ended, numbers["norm"]), dropped=dropped)


def _encoded_means(state: OuterState, index: int, loaded: Sequence[Tensor]) -> list[EncodedVector]:
    """One for each lane; empty where this rank has nothing of the fragment, or there was no mean."""
    rest = list(loaded)
    means = []
    for fragment in (lane.fragments[index] for lane in state.lanes):
        if fragment is None:
            means.append(EncodedVector(codec("fp32"), PartLayout(0)))
            continue
        means.append(EncodedVector(codec("fp32"), fragment.layout, fragment.anchor.device))
        if rest:
            means[-1].encode(0, rest.pop(0))
    return means


def _result(saved: Mapping[str, Any], means: Sequence[EncodedVector]) -> RoundResult:
    members = [
        member | {"report": Report(**member["report"] | {"stopping": False, "done": False})}
        for member in saved["members"]
    ]
    return RoundResult(
        mean=means[0],
        lane_means=tuple(means),
        contributors=tuple(saved["contributors"]),
        refused={int(worker): reason for worker, reason in saved["refused"].items()},
        members=tuple(Member(**member) for member in members),
        roster=tuple(saved["roster"]),
        comparison=Comparison(  # earlier versions saved less
            tuple(saved.get("products", ())), tuple(saved.get("replaced", ())), saved.get("parts", 0)
        ),
        clipped={int(worker): reason for worker, reason in saved.get("clipped", {}).items()},
        **{name: saved[name] for name in _RESULT_NUMBERS if name in saved},
    )
