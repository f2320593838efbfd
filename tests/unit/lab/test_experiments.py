"""Every experiment is complete at every scale: its claims, figures and published values name arms that it has."""

import tomllib
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.lab.claims import SeedResults
from diloco.lab.experiment import Experiment, Sweep
from diloco.lab.experiments import EXPERIMENTS, experiment_of, run_files
from diloco.lab.results import TUNING_SEED, ResultFolder, key_of
from diloco.lab.scales import SCALES, Scale

EVERY = [(experiment, scale) for experiment in EXPERIMENTS.values() for scale in SCALES.values()]
IDS = [f"{experiment.name}-{scale.name}" for experiment, scale in EVERY]


@pytest.mark.parametrize(("experiment", "scale"), EVERY, ids=IDS)
def test_claims_and_figures_name_arms_of_their_experiment(experiment: Experiment, scale: Scale) -> None:
    arms = experiment.arms(scale)
    figures = {"cosine": 0.5, "mean_norm": 1.0, "bytes": 1.0, "simulated_seconds": 1.0}
    measured = SeedResults(dict.fromkeys(arms, 3.0), dict.fromkeys(arms, figures))
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
def test_the_three_sizes_share_their_regime_and_see_ten_tokens_a_parameter(name: str) -> None:
    scale, other = SCALES[name], SCALES["4m"]
    for shared in (
        "vocab_size", "workers", "batch_size", "sequence_length", "replicas", "eval_windows", "warmup_steps",
        "final_lr_ratio", "eval_points",
    ):  # fmt: skip
        assert getattr(scale, shared) == getattr(other, shared), shared
    assert scale.rounds() == other.rounds() == 50
    assert scale.steps == 2 * scale.pretraining_steps
    parameters = scale.diloco().model_config(scale.vocab_size).num_parameters()
    assert scale.tokens() >= 10 * parameters
    assert scale.tokens() <= 8 * 44_000_000  # eight passes over the text that they are made for


def test_arms_that_experiments_share_have_one_key() -> None:
    scale = SCALES["gpu"]
    keys = {EXPERIMENTS[name].arms(scale)[arm].key() for name, arm in (("t2", "DiLoCo"), ("f4", "H = 50"))}
    keys |= {EXPERIMENTS[name].arms(scale)[arm].key() for name, arm in (("f8", "0% dropped"), ("t6", "0% pruned"))}
    assert len(keys) == 1


def test_an_unknown_experiment_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="t2, t3"):
        experiment_of("t9")


MEASURED = ("1m", "4m")
LAB = Path(__file__).parents[3] / "benchmarks" / "results" / "lab"


@pytest.mark.parametrize("name", MEASURED)
def test_the_published_results_are_those_of_arms_as_they_are_now(name: str) -> None:
    """`diloco lab run` them again after a change of an arm, and write docs/results.md again."""
    folder = ResultFolder(LAB / name)
    assert folder.setting().scale == name
    known = {
        key_of(arm, seed, folder.setting().texts["text"]): (experiment.name, arm_name)
        for experiment in EXPERIMENTS.values()
        if experiment.text == "text"
        for arm_name, arm in experiment.arms(SCALES[name]).items()
        for seed in range(6)
    }
    stored = {path.stem.rpartition("-")[0] for path in (LAB / name / "results").glob("*.json")}
    judging = {key for key in stored if int(key.rpartition("-")[2]) < TUNING_SEED}
    assert judging and not judging - set(known)
    seeds_of = {key.rpartition("-")[0]: {other for other in judging if other.startswith(key[:-1])} for key in judging}
    # One call of the machine each: its arms share their beginnings.
    seed_sets = [{0, 1, 2}, {3, 4, 5}, {0, 1, 2, 3, 4, 5}]
    for arm_key, keys in seeds_of.items():
        assert {int(key.rpartition("-")[2]) for key in keys} in seed_sets, arm_key


@pytest.mark.parametrize("name", MEASURED)
def test_a_scale_has_the_numbers_that_were_found_for_it(name: str) -> None:
    scale, records = SCALES[name], ResultFolder(LAB / name).searches()
    for experiment in EXPERIMENTS.values():
        for search in experiment.tuning(scale) if experiment.tuning is not None else []:
            if (record := records.get(f"{experiment.name}: {search.name}")) is not None:
                assert search.values(search.first()) == record.chosen, search.name
                if not record.unmeasured_neighbours:
                    assert record.chosen | {"loss": record.tried[0]["loss"]} == record.tried[0]
    assert {"regime: 8× batch, data-parallel", "t2: 1× baseline", "t2: DiLoCo"} <= set(records)


@pytest.mark.parametrize("name", run_files.FILES)
def test_the_arms_of_run_files_have_the_numbers_of_the_files(name: str) -> None:
    file = tomllib.loads((LAB.parents[2] / "examples" / "runs" / f"{name}.toml").read_text())
    not_simulated = {"warm_start", "timeout_seconds", "dynamic_steps"}
    assert {key: value for key, value in file["sync"].items() if key not in not_simulated} == run_files.FILES[name]
    assert file["outer"] == run_files.OUTER
