"""What is known of a round's end reaches the result and a saved state whole, without a line for each field."""

import json
from dataclasses import fields

import pytest

from diloco.core.merging import Decision
from diloco.engines.rounds import RoundPhases, RoundSummary
from support.round_summary import FULL


@pytest.mark.parametrize("name", [each.name for each in fields(RoundSummary)])
def test_every_field_is_read_from_json_as_it_was_saved(name: str) -> None:
    assert getattr(FULL, name) != getattr(RoundSummary(), name), "the test has a value for each field"
    read = RoundSummary.from_json(json.loads(json.dumps(FULL.as_json())))
    assert getattr(read, name) == getattr(FULL, name)
    assert type(getattr(read, name)) is type(getattr(FULL, name))


def test_a_field_that_an_earlier_version_did_not_save_has_its_default() -> None:
    saved = FULL.as_json()
    del saved["signatures"]
    del saved["phases"]["reduce_seconds"]
    read = RoundSummary.from_json(saved)
    assert read.signatures == 0
    assert read.phases == RoundPhases(0.25, None, None)


def test_what_a_decision_tells_of_a_mean_has_the_same_name_in_the_summary() -> None:
    told = Decision((0,), (1.0,), {1: "no"}, resync=True, total_weight=1.0).summary_fields()
    assert told.keys() <= {each.name for each in fields(RoundSummary)}
    assert "resync" not in told
