"""Every experiment is complete at every scale: its claims, figures and published values name arms that it has."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.lab.claims import Measured
from diloco.lab.experiment import Experiment, Sweep
from diloco.lab.experiments import EXPERIMENTS, experiment_of
from diloco.lab.results import ResultFolder, key_of
from diloco.lab.scales import SCALES, Scale

EVERY = [(experiment, scale) for experiment in EXPERIMENTS.values() for scale in SCALES.values()]
IDS = [f"{experiment.name}-{scale.name}" for experiment, scale in EVERY]


@pytest.mark.parametrize(("experiment", "scale"), EVERY, ids=IDS)
def test_claims_and_figures_name_arms_of_their_experiment(experiment: Experiment, scale: Scale) -> None:
    arms = experiment.arms(scale)
    figures = {"cosine": 0.5, "mean_norm": 1.0, "bytes": 1.0, "simulated_seconds": 1.0}
    measured = Measured(dict.fromkeys(arms, 3.0), dict.fromkeys(arms, figures))
    for claim in experiment.claims(scale):
        claim.value(measured)  # a KeyError names an arm that is not there
        assert claim.range_text
    for figure in experiment.figures(scale):
        named = [arm for line in figure.lines.values() for arm in line] if isinstance(figure, Sweep) else figure.arms
        assert set(named) <= set(arms)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_published_values_name_arms_at_the_largest_scale(experiment: Experiment) -> None:
    assert set(experiment.published) <= set(experiment.arms(SCALES["gpu"]))


@pytest.mark.parametrize("name", ["cpu", "gpu", "1m", "4m", "14m"])
def test_the_regime_has_shared_pre_training_and_fifty_rounds(name: str) -> None:
    scale = SCALES[name]
    part = scale.pretraining_steps / (scale.pretraining_steps + scale.steps)
    assert 0.25 <= part <= 0.34
    assert scale.rounds() >= 50
    arms = (scale.diloco(), scale.data_parallel(), scale.one_worker(), scale.one_worker(updates_multiplier=8))
    beginnings = {(arm.pretraining_steps, arm.pretraining_batch_size, str(arm.pretraining_inner)) for arm in arms}
    assert len(beginnings) == 1


@pytest.mark.parametrize("name", ["1m", "4m", "14m"])
def test_the_three_sizes_differ_in_the_model_alone_and_see_ten_tokens_a_parameter(name: str) -> None:
    scale, other = SCALES[name], SCALES["4m"]
    assert replace(scale, name="4m", model=other.model) == other
    parameters = scale.diloco().model_config(scale.vocab_size).num_parameters()
    assert scale.tokens() >= 10 * parameters
    assert scale.tokens() <= 8 * 45_000_000  # eight passes over the text that they are made for


def test_arms_that_experiments_share_have_one_key() -> None:
    scale = SCALES["gpu"]
    keys = {EXPERIMENTS[name].arms(scale)[arm].key() for name, arm in (("t2", "DiLoCo"), ("f4", "H = 50"))}
    keys |= {EXPERIMENTS[name].arms(scale)[arm].key() for name, arm in (("f8", "0% dropped"), ("t6", "0% pruned"))}
    assert len(keys) == 1


def test_an_unknown_experiment_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="t2, t3"):
        experiment_of("t9")


NOT_MEASURED = {"regime", "missed_rounds"}
"""Experiments that have no results of scale gpu in the repository: they are for the scales 1m, 4m and 14m."""
PUBLISHED = {name: one for name, one in EXPERIMENTS.items() if name not in NOT_MEASURED}


@pytest.mark.parametrize("experiment", PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_results_are_those_of_the_arms_as_they_are_now(experiment: Experiment) -> None:
    folder = ResultFolder(Path(__file__).parents[3] / "benchmarks" / "results" / "lab")
    digest = folder.setting().texts[experiment.text]
    arms = experiment.arms(SCALES["gpu"])
    missing = [
        (name, seed)
        for name, arm in arms.items()
        for seed in range(3)
        if not folder.has(key_of(arm, seed, digest), None)
    ]
    assert not missing, "diloco lab run these, and docs/results.md again"
