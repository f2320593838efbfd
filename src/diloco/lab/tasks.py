"""The tasks of a run: which arms with which seeds, in which order, and how long they would take on an H200.

Experiments come in the order asked for; within one, its arms in their order, each with all seeds, so that what is most
important is finished first and with enough seeds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from diloco.errors import ConfigError
from diloco.lab.arm import Arm
from diloco.lab.code import simulation_code
from diloco.lab.experiment import Experiment
from diloco.lab.results import Setting, key_of
from diloco.lab.scales import Scale
from diloco.lab.texts import Texts

_LARGE = 4.0
"""An arm that costs more than this many times DiLoCo's, such as one of 64 replicas, comes after all others."""


@final
@dataclass(frozen=True)
class ArmTask:
    """One arm with one seed, to be run."""

    key: str
    """Key of the result, without its code."""
    code: str
    """The code that the result depends on (code.py)."""
    name: str
    arm: Arm
    seed: int
    text: str


def setting_of(texts: Texts, roles: Iterable[str]) -> Setting:
    """Open the texts of these roles, and return the setting that the folder of results records."""
    corpora = {role: texts.open(role) for role in sorted(set(roles))}
    described = {
        role: f"{Path(getattr(texts, role)).name}: {corpus.train_tokens / 1e6:.1f}M tokens, vocabulary "
        f"{corpus.vocab_size}, {corpus.shards} shards ({corpus.meta.partition})"
        for role, corpus in corpora.items()
    }
    return Setting(texts.scale.name, {role: corpus.digest for role, corpus in corpora.items()}, described)


def code_of(experiment: Experiment, how: str) -> str:
    """Return the last part of a result's name: the hash of the simulation's code, that of the experiment's file if it
    adds code, and `how` replicas are computed if that was asked for."""
    way = "" if how == "auto" else how.replace(" ", "")
    return ".".join(part for part in (simulation_code(), experiment.code, way) if part)


def tasks_of(
    experiments: Sequence[Experiment], scale: Scale, seeds: Sequence[int], digests: dict[str, str], how: str = "auto"
) -> list[ArmTask]:
    """List all arms of the experiments, each once, the most important first; those that cost most come after all."""
    tasks: dict[str, ArmTask] = {}
    for experiment in experiments:
        code = code_of(experiment, how)
        for name, arm in experiment.arms(scale).items():
            for seed in seeds:
                key = key_of(arm, seed, digests[experiment.text])
                task = ArmTask(key, code, f"{experiment.name}: {name}", arm, seed, experiment.text)
                tasks.setdefault(f"{key}-{code}", task)
    limit = _LARGE * cost(scale.diloco(), scale.vocab_size)
    return sorted(tasks.values(), key=lambda task: cost(task.arm, scale.vocab_size) > limit)


def cost(arm: Arm, vocab_size: int) -> float:
    """Return the cost in units that compare arms: tokens that are computed, times the parameters."""
    tokens = arm.steps * arm.updates_multiplier * arm.workers * arm.batch_size * arm.batch_multiplier
    return float(tokens * arm.sequence_length) * arm.model_config(vocab_size).num_parameters()


_COMPILING_SECONDS = 40.0
_STEP_SECONDS = 1e-3
_TOKEN_SECONDS = 31e-9
_TOKEN_AND_PARAMETER_SECONDS = 23.3e-15
"""Measured on an H200 with 8 to 12 processes at 1.3M and 4.3M parameters (docs/results.md): 62 and 130 ns a token. A
step takes a millisecond however small it is."""


def seconds_on_an_h200(tasks: Sequence[ArmTask], vocab_size: int) -> float:
    """Return the seconds that the tasks would take on one shared H200, with shared beginnings and compiling."""
    seconds = _COMPILING_SECONDS
    beginnings = {}
    for task in tasks:
        arm = task.arm
        parameters = arm.model_config(vocab_size).num_parameters()
        token_seconds = _TOKEN_SECONDS + _TOKEN_AND_PARAMETER_SECONDS * parameters
        steps = arm.steps * arm.updates_multiplier
        batch = arm.workers * arm.batch_size * arm.batch_multiplier
        seconds += steps * max(_STEP_SECONDS, batch * arm.sequence_length * token_seconds)
        size = arm.pretraining_batch_size or arm.batch_size
        beginning = (task.seed, parameters, arm.pretraining_steps, size, arm.steps, repr(arm.pretraining_config))
        beginnings[beginning] = arm.pretraining_steps * size * arm.sequence_length * token_seconds
    return seconds + sum(beginnings.values())


def check_seeds(seeds: int) -> range:
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} must be at least 1 (a verdict needs 3)")
    return range(seeds)
