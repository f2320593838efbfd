"""The experiments, the most important first: the order in which `diloco lab run --all` runs them.

`paper/` has the tables and figures of the DiLoCo paper, `after/` what later papers and this project ask.
"""

from diloco.errors import ConfigError
from diloco.lab.experiment import Experiment
from diloco.lab.experiments.after import (
    eager,
    equal_tokens,
    error_feedback,
    fp16,
    hostile,
    missed_rounds,
    muon,
    overlap,
    schedules,
    streaming,
    workers_and_h,
)
from diloco.lab.experiments.paper import f3, f4, f5, f6, f7, f8, f9, f10, regime, t2, t3, t4, t6

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        *(t2, t3, t6, f3, f4, f6, f8, f9, streaming, eager, overlap, schedules, error_feedback, fp16),
        *(workers_and_h, muon, equal_tokens, f7, f10, f5, t4, hostile, regime, missed_rounds),
    )
}


def experiment_of(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is named {name!r}: they are {', '.join(EXPERIMENTS)} (diloco lab list)")
    return EXPERIMENTS[name]
