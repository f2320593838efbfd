"""The header of a contribution, sent before it: a fixed number of bytes, no pickle, no varying length."""

import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import isfinite, isinf, isnan, nan

from diloco.core.merging import MAX_WEIGHT_ROUNDS, Claim
from diloco.engines.note import is_loss
from diloco.engines.rounds import CONFIRMATION, GRADIENTS, Contribution, Member, Report, RoundKey
from diloco.errors import EngineError

_MAGIC = b"dlc6"
_LAST_ROUND = 8
_FORMAT = struct.Struct(f"<4s qq ddddd 16s16s qqqddddqqq??d {_LAST_ROUND}d")
HEADER_BYTES = _FORMAT.size
_LARGEST = 1 << 62


def pack(key: RoundKey, contribution: Contribution) -> bytes:
    """Write the header. A weight above MAX_WEIGHT_ROUNDS rounds of work is written as that: no more of it counts, and
    a claim is a lie.

    A number of the report that is not finite is written as nan.
    """
    *report, last_round_seconds = astuple(contribution.report)
    return _FORMAT.pack(
        _MAGIC,
        key.sequence,
        key.fragment,
        min(contribution.weight, MAX_WEIGHT_ROUNDS * contribution.round_weight),
        contribution.norm,
        contribution.round_weight,
        contribution.work,
        contribution.full_weight,
        contribution.anchor_digest.encode(),
        contribution.layout_digest.encode(),
        *(_finite(value) for value in report),
        *(last_round_seconds or [nan] * _LAST_ROUND),
    )


def _finite(value: object) -> object:
    return nan if isinstance(value, float) and not isfinite(value) else value


@dataclass(frozen=True)
class Header:
    """One worker's statement about its contribution to a round."""

    worker: int
    key: RoundKey
    claim: Claim
    layout_digest: str
    member: Member


def unpack(worker: int, data: bytes) -> Header:
    """Read a received header; refuses bytes that another version wrote."""
    values = _FORMAT.unpack(data)
    magic, sequence, fragment, weight, norm, round_weight, work, full_weight, anchor, layout, *reported = values
    if magic != _MAGIC:
        raise EngineError(
            f"worker {worker} speaks another protocol ({magic!r} instead of {_MAGIC!r}): "
            "run the same version of diloco everywhere"
        )
    last = tuple(reported[-_LAST_ROUND:])
    reported[-_LAST_ROUND:] = [() if isnan(last[0]) else last]
    report = Report(*reported)
    anchor_digest = anchor.rstrip(b"\0").decode("ascii", "replace")
    claim = Claim(weight, norm, anchor_digest, round_weight, work, full_weight, report.done)
    member = Member(worker, anchor_digest, weight, norm, report)
    return Header(worker, RoundKey(sequence, fragment), claim, layout.rstrip(b"\0").decode("ascii", "replace"), member)


def header_of(worker: int, key: RoundKey, contribution: Contribution) -> Header:
    """Make the header of a contribution that stays in this process."""
    report = contribution.report
    digest = contribution.anchor_digest
    claim = Claim(
        contribution.weight,
        contribution.norm,
        digest,
        contribution.round_weight,
        contribution.work,
        contribution.full_weight,
        report.done,
    )
    member = Member(worker, digest, contribution.weight, contribution.norm, report)
    return Header(worker, key, claim, contribution.layout_digest, member)


def find_report_fault(report: Report) -> str | None:
    """Name a value that no honest worker reports, if there is one: then nothing of the report can be used."""
    *values, last_round_seconds = astuple(report)
    for name, value in zip(Report.__dataclass_fields__, values, strict=False):
        if isinstance(value, float) and isinf(value):
            return f"its report has {name} = {value}"
        if not isinstance(value, float) and not -1 <= value <= _LARGEST:
            return f"its report has {name} = {value}"
    if any(isinf(seconds) for seconds in last_round_seconds):
        return "its report has a last round without end"
    return None if is_loss(report.validation_loss) else f"its report has validation_loss = {report.validation_loss:.3g}"


def check_same_round(headers: list[Header], mine: Header) -> None:
    """Refuse headers of another model, other settings or another round: such parts must not be mixed."""
    check_same_layout({header.worker: header.layout_digest for header in headers}, mine.worker)
    for other in headers:
        if other.key != mine.key:
            raise EngineError(
                f"worker {other.worker} is in {_place(other.key)}, worker {mine.worker} in {_place(mine.key)}. Call "
                "finish() on every worker after its last step, and leave the loop when optimizer.stopping; within a "
                "warm start all must take the same steps"
            )


def _place(key: RoundKey) -> str:
    if key.fragment == GRADIENTS:
        return f"the warm start, {-key.sequence} {'step' if key.sequence == -1 else 'steps'} before its end"
    return "finish()" if key.fragment == CONFIRMATION else f"round {key.sequence} (fragment {key.fragment})"


def check_same_layout(digests: Mapping[int, str], worker: int) -> None:
    """Refuse workers that train different things. `digests`: of each worker's layout."""
    for other, digest in digests.items():
        if digest != digests[worker]:
            raise EngineError(
                f"worker {other} trains something else than worker {worker} (layout {digest} against "
                f"{digests[worker]}): model, data, codec, schedule and outer optimizer must be the same everywhere; "
                "compare the workers' config.toml and versions"
            )
