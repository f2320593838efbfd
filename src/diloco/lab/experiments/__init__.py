"""The experiments, the most important first: the order in which `diloco lab run --all` runs them."""

from diloco.errors import ConfigError
from diloco.lab.experiment import Experiment
from diloco.lab.experiments import (
    eager,
    equal_tokens,
    error_feedback,
    f3,
    f4,
    f5,
    f6,
    f7,
    f8,
    f9,
    f10,
    fp16,
    hostile,
    muon,
    streaming,
    t2,
    t3,
    t4,
    t6,
    workers_and_h,
)

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        *(t2, f4, f8, t6, f6, f9, t3, f3, streaming),
        *(f5, fp16, f7, f10, equal_tokens, muon, error_feedback, eager, hostile, workers_and_h, t4),
    )
}


def experiment_of(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is named {name!r}: they are {', '.join(EXPERIMENTS)} (diloco lab list)")
    return EXPERIMENTS[name]
