"""What a worker reads if another one is elsewhere in the run."""

import pytest

from diloco.core.merging import Claim
from diloco.engines.header import Header, check_same_round
from diloco.engines.rounds import Member, Report, RoundKey
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
