"""The experiments, the most important first: the order in which `diloco lab run --all` runs them.

t2 to f10 are the tables and figures of the DiLoCo paper; the others are what later papers and this project ask.
"""

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
    missed_rounds,
    muon,
    overlap,
    regime,
    run_files,
    schedules,
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
        *(t2, t3, t6, f3, f4, f6, f8, f9, streaming, eager, overlap, schedules, error_feedback, fp16),
        *(workers_and_h, muon, equal_tokens, f7, f10, f5, t4, hostile, regime, run_files, missed_rounds),
    )
}


def experiment_of(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is named {name!r}: they are {', '.join(EXPERIMENTS)} (diloco lab list)")
    return EXPERIMENTS[name]
