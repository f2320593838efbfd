"""Every row of the table of refused combinations refuses what it names, with the reason and what to do, and no more."""

from itertools import combinations
from typing import Any

import pytest

from diloco.core.config import REFUSED_COMBINATIONS, FaultsConfig, RefusedCombination, SyncConfig, refuse_combinations
from diloco.errors import ConfigError

EXAMPLES: dict[str, dict[str, Any]] = {
    "sync.fragments": {"fragments": 2},
    "sync.fragments_by_hand": {"fragments_by_hand": "*a*; *b*"},
    "sync.fragment_order": {"fragment_order": "sequential"},
    "sync.error_feedback": {"error_feedback": True},
    "sync.error_decay": {"error_decay": 0.9},
    "sync.codec": {"codec": "topk"},
    "sync.merge": {"merge": "clipped"},
    "sync.outer_overlap": {"outer_overlap": "eager"},
    "sync.asynchronous": {"asynchronous": True},
    "sync.growth": {"growth": 0.02},
    "sync.dynamic_steps": {"dynamic_steps": True},
    "sync.overlap_steps": {"overlap_steps": 2},
    "sync.mixing": {"mixing": 0.5},
    "sync.prune": {"prune": 0.5},
    "sync.offload": {"offload": True},
    "sync.second_moment_every": {"second_moment_every": 2},
    "sync.momentum_arrivals": {"momentum_arrivals": 2},
    "sync.warm_start": {"warm_start": 4},
    "faults.drop": {"drop": 0.3},
}
"""A value with which each option is in force."""
WITHOUT_EFFECT: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("sync.fragment_order", "sync.fragments"): ({"fragment_order": "sequential"}, {"fragments": 2}),
    ("sync.error_feedback", "sync.codec"): ({"error_feedback": True, "codec": "fp32"}, {"codec": "int4"}),
    ("sync.error_decay", "sync.error_feedback"): ({"error_decay": 0.9}, {"error_feedback": True}),
    ("sync.momentum_arrivals", "sync.asynchronous"): ({"momentum_arrivals": 2}, {"asynchronous": True}),
}
"""Rows of an option without effect: what is refused, and what gives it an effect."""


def build(given: dict[str, Any]) -> SyncConfig:
    """Options as a run is given them, all tables together."""
    rest = dict(given)
    faults = FaultsConfig(rest.pop("drop", 0.0))
    sync = SyncConfig(20, **rest)
    refuse_combinations(sync, faults)
    return sync


def example(row: RefusedCombination) -> dict[str, Any]:
    if row.options in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[row.options][0]
    first, second = row.options
    return EXAMPLES[first] | EXAMPLES[second]


@pytest.mark.parametrize("row", REFUSED_COMBINATIONS, ids=lambda row: " with ".join(row.options))
def test_a_combination_is_refused_with_both_names_the_reason_and_the_remedy(row: RefusedCombination) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(example(row))
    said = str(refusal.value)
    assert all(name.split(".")[1] in said for name in row.options)
    assert "{" not in said and any(remedy in said for remedy in ("leave out", "leave it out", "give"))
    assert len(said) > 60 and said.startswith(row.message.split("{")[0])
    assert "True" not in said and "False" not in said, "as in a run file: true, false"


@pytest.mark.parametrize("row", REFUSED_COMBINATIONS, ids=lambda row: " with ".join(row.options))
def test_each_of_the_two_is_accepted_without_the_other(row: RefusedCombination) -> None:
    if row.options in WITHOUT_EFFECT:
        refused, remedy = WITHOUT_EFFECT[row.options]
        build(refused | remedy)
        return
    for name in row.options:
        build(EXAMPLES[name])


def test_all_pairs_that_no_row_names_are_accepted() -> None:
    rows = {frozenset(row.options) for row in REFUSED_COMBINATIONS}
    alone = {"sync.fragment_order", "sync.error_decay", "sync.momentum_arrivals"}  # refused by themselves, above
    for first, second in combinations(sorted(EXAMPLES.keys() - alone), 2):
        if frozenset((first, second)) in rows:
            continue
        if {first, second} == {"sync.codec", "sync.asynchronous"}:  # topk has error feedback
            continue
        build(EXAMPLES[first] | EXAMPLES[second])
