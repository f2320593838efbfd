"""What a worker reads if another one is elsewhere in the run."""

import pytest

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.core.merging import Claim
from diloco.engines.header import HEADER_BYTES, Header, check_same_round, pack, unpack
from diloco.engines.rounds import Contribution, Member, Report, RoundKey
from diloco.errors import EngineError


def header(worker: int, key: RoundKey) -> Header:
    return Header(worker, key, Claim(1.0, 1.0, "aa"), "layout", Member(worker, "aa", 1.0, 1.0, Report()))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (RoundKey(3, 1), "round 3 (fragment 1)"),
        (RoundKey(3, -1), "finish()"),
        (RoundKey(-5, -2), "the warm start, 5 steps before its end"),
        (RoundKey(-1, -2), "the warm start, 1 step before its end"),
    ],
)
def test_workers_in_different_rounds_are_told_where_each_is(key: RoundKey, place: str) -> None:
    headers = [header(0, RoundKey(0, 0)), header(1, key)]
    with pytest.raises(EngineError) as raised:
        check_same_round(headers, headers[0])
    assert str(raised.value).startswith(f"worker 1 is in {place}, worker 0 in round 0 (fragment 0). Call finish()")


@pytest.mark.parametrize("last_round_seconds", [(), (7.0, 0.1, 0.0, 2.5, 0.25, 2.0, 0.4, 0.1)])
def test_a_header_carries_the_phases_of_the_last_round(last_round_seconds: tuple[float, ...]) -> None:
    report = Report(inner_steps=3, loss=0.5, last_round_seconds=last_round_seconds)
    sent = Contribution(EncodedVector(codec("fp32"), PartLayout(0)), 1.0, 1.0, "aa", "layout", report=report)
    data = pack(RoundKey(2, 0), sent)
    assert len(data) == HEADER_BYTES
    report = unpack(1, data).member.report
    assert (report.inner_steps, report.loss, report.last_round_seconds) == (3, 0.5, last_round_seconds)
