"""What a scale must show before its tables mean anything: the gates, and the tuning of both sides.

The paper's regime is one in which more batch helps (one worker alone is 6 % above eight times the batch), frequent
rounds are as good as data parallelism, and even rare ones beat one worker. Each gate is such a statement. A scale that
misses one says so in its report; it is not shrunk until it passes.
"""

import math
from collections.abc import Callable, Mapping

from diloco.lab.arm import Arm
from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

ONE, BATCH, ALONE = "one worker", "8× batch, data-parallel", "one worker with outer steps"
_FACTORS = (0.5, 1.0, 2.0, 4.0)
_OUTER = tuple((lr, momentum) for lr in (0.5, 0.7, 1.0) for momentum in (0.6, 0.8, 0.9))
_OUTER_ALONE = tuple((lr, momentum) for lr in (0.4, 0.7, 1.0) for momentum in (0.2, 0.5, 0.8))
ALONE_OUTER = (0.7, 0.5)
"""Outer rate and momentum of a single worker, where tuning begins."""


def _lengths(scale: Scale) -> tuple[int, int, int]:
    """A short, the usual and a long H: 10, 40 and 200 where H is 40."""
    return max(1, scale.H // 4), scale.H, 5 * scale.H


def _name(H: int) -> str:
    return f"DiLoCo, H = {H}"


def _diloco(scale: Scale, H: int, *, lr: float | None = None, outer: tuple[float, float] | None = None) -> Arm:
    steps = max(1, round(scale.steps / H)) * H
    numbers = {} if outer is None else {"lr": outer[0], "momentum": outer[1]}
    inner = {} if lr is None else {"lr": lr}
    return scale.diloco(sync={"num_inner_steps": H}, steps=steps, outer=numbers, inner=inner)


def _alone(scale: Scale, outer: tuple[float, float], factor: float = 1.0) -> Arm:
    inner = {"lr": factor * scale.one_worker_lr}
    return scale.diloco(workers=1, outer={"lr": outer[0], "momentum": outer[1]}, inner=inner)


def arms(scale: Scale) -> Arms:
    made = {_name(H): _diloco(scale, H) for H in _lengths(scale)}
    return made | {
        BATCH: scale.data_parallel(),
        ONE: scale.one_worker(),
        ALONE: _alone(scale, ALONE_OUTER),
    }


def claims(scale: Scale) -> tuple[Claim, ...]:
    short, usual, long = _lengths(scale)
    return (
        Claim(
            "Gate: one worker alone is 5 to 25 % above data parallelism",
            "+6.1 % (16.23 against 15.30)",
            lambda m: m.change(ONE, BATCH),
            at_least=0.05,
            at_most=0.25,
            expected=16.23 / 15.30 - 1,
        ),
        Claim(
            f"Gate: H = {short} is within 0.5 % of data parallelism",
            "–",
            lambda m: m.change(_name(short), BATCH),
            at_most=0.005,
        ),
        Claim(
            f"Gate: even H = {long} beats one worker",
            "better (Figure 4)",
            lambda m: m.change(_name(long), ONE),
            at_most=0.0,
        ),
        Claim(
            "Gate: outer steps of a single worker cost nothing",
            "better (Figure 9)",
            lambda m: m.change(ALONE, ONE),
            at_most=0.0,
        ),
        Claim(
            f"H = {usual} keeps at least half of the window between one worker and data parallelism",
            "130 % (15.02 between 16.23 and 15.30)",
            lambda m: m.window_kept(_name(usual), ONE, BATCH),
            at_least=0.5,
            expected=math.log(16.23 / 15.02) / math.log(16.23 / 15.30),
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    places = {_name(H): float(H) for H in _lengths(scale)}
    return (Sweep("Perplexity by H", "H, inner steps between rounds", {"DiLoCo": places}, x_log=True),)


def tuning(scale: Scale) -> Mapping[str, Arms]:
    """Inner rates of every side; outer rate and momentum of DiLoCo for each H and for a single worker."""
    short, usual, long = _lengths(scale)
    made: dict[str, Arms] = {
        BATCH: _rates(scale.data_parallel_lr, lambda lr: scale.data_parallel(inner={"lr": lr})),
        ONE: _rates(scale.one_worker_lr, lambda lr: scale.one_worker(inner={"lr": lr})),
    }
    for H in (usual, short, long):
        made[f"{_name(H)}, inner rate"] = _rates(scale.inner_lr, lambda lr, H=H: _diloco(scale, H, lr=lr))  # type: ignore[misc]
        made[f"{_name(H)}, outer step"] = {
            f"{lr} / {momentum}": _diloco(scale, H, outer=(lr, momentum)) for lr, momentum in _OUTER
        }
    made[f"{ALONE}, outer step"] = {
        f"{lr} / {momentum}": _alone(scale, (lr, momentum)) for lr, momentum in _OUTER_ALONE
    }
    made[f"{ALONE}, inner rate"] = {f"× {factor:g}": _alone(scale, ALONE_OUTER, factor) for factor in _FACTORS}
    return made


def _rates(usual: float, arm_of: Callable[[float], Arm]) -> Arms:
    return {f"lr {lr:g}": arm_of(lr) for lr in (usual * factor for factor in _FACTORS)}


EXPERIMENT = Experiment(
    name="regime",
    title="The regime: gates and tuning",
    source="DiLoCo, Table 2, Figures 4 and 9",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
    note="A gate that is missed is a property of this scale, and is to be read beside every table below.",
)
