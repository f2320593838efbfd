"""The note beside a contribution: one form, bounds on every number, and one exception for all that is not that form."""

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.engines.header import find_report_fault
from diloco.engines.note import MAX_NOTE_BYTES, MalformedNote, Note, ValidationFigure, read_note, write_note
from diloco.engines.rounds import Report

COUNTS = st.integers(0, 1 << 53)
FIGURES = st.builds(ValidationFigure, COUNTS, st.floats(0, 1e6), st.integers(1, 1 << 53))
NOTES = st.builds(
    Note,
    st.dictionaries(st.integers(0, 2**32 - 1), st.tuples(COUNTS, COUNTS), max_size=8),
    st.frozensets(st.integers(0, 1 << 20), max_size=8),
    st.none() | FIGURES,
    COUNTS,
    st.dictionaries(st.integers(0, 1 << 20), COUNTS, max_size=8),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(NOTES)
def test_a_note_says_what_was_written(note: Note) -> None:
    assert read_note(write_note(note)) == note


def test_no_note_is_an_empty_one() -> None:
    assert read_note(b"") == Note() == read_note(write_note(Note()))


def test_a_loss_that_is_not_finite_is_told_as_nan() -> None:
    for loss in (math.inf, -math.inf, math.nan, 1e300):
        told = read_note(write_note(Note(validation=ValidationFigure(3, loss, 5)))).validation
        assert told is not None and math.isnan(told.loss)


def packed(
    step: int = -1,
    loss: float = 1.0,
    tokens: int = 1,
    shards: int = 0,
    apart: int = 0,
    rest: bytes = b"",
    own_tokens: int = 0,
    counted: int = 0,
) -> bytes:
    return struct.pack("<4sqdqqHHH", b"dln2", step, loss, tokens, own_tokens, shards, apart, counted) + rest


@pytest.mark.parametrize(
    "data",
    [
        json.dumps({"read": {"1" * 5000: [0, 0]}}).encode(),
        b'{"validation": [1, ' + b"9" * 400 + b", 32]}",
        b"{" * 10_000,
        b"\xff\xfe",
        b"dln2",
        packed(step=-2),
        packed(step=1, tokens=0),
        packed(step=1, loss=math.inf),
        packed(step=1, loss=-1.0),
        packed(step=1, loss=1e300),
        packed(shards=1),
        packed(shards=65535, apart=65535),
        packed(rest=b"more"),
        packed(shards=1, rest=struct.pack("<Iqq", 0, -1, 0)),
        packed(shards=1, rest=struct.pack("<Iqq", 0, 0, 1 << 60)),
        packed(apart=1, rest=struct.pack("<I", 1 << 31)),
        packed(own_tokens=-1),
        packed(own_tokens=1 << 60),
        packed(counted=1),
        packed(counted=65535),
        packed(counted=1, rest=struct.pack("<Iq", 1 << 31, 1)),
        packed(counted=1, rest=struct.pack("<Iq", 1, -1)),
        packed(counted=1, rest=struct.pack("<Iq", 1, 1 << 60)),
        write_note(Note()) + bytes(MAX_NOTE_BYTES),
    ],
)
def test_what_is_not_of_its_form_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedNote):
        read_note(data)


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (Report(), None),
        (Report(loss=math.nan, validation_loss=2.5, validation_step=3), None),
        (Report(inner_steps=-5), "inner_steps"),
        (Report(step_seconds=math.inf), "step_seconds"),
        (Report(validation_loss=1e300), "validation_loss"),
        (Report(last_round_seconds=(1.0, math.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), "last round"),
    ],
)
def test_a_report_out_of_range_is_found(report: Report, fault: str | None) -> None:
    found = find_report_fault(report)
    assert found is None if fault is None else fault in (found or "")


def test_a_count_that_another_member_made_too_large_leaves_a_note_readable() -> None:
    told = read_note(write_note(Note(own_tokens=(1 << 53) + 4096, tokens={7: (1 << 53) + 4096})))
    assert told.own_tokens == told.tokens[7] == 1 << 53
