"""Figure 9 of the DiLoCo paper: outer steps of a single worker."""

from collections.abc import Mapping

from diloco.lab.arm import Arm
from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

ONE, OUTER = "1× baseline", "one worker with outer steps"
TUNED = {"smoke": (0.7, 0.5, 1.0), "cpu": (0.7, 0.5, 1.0), "gpu": (0.7, 0.5, 1.0)}
"""The best of `tuning` at gpu scale: outer rate, momentum, and the inner rate as a factor of one worker's."""
CANDIDATES = ((0.7, 0.9, 1.0), (0.7, 0.5, 1.0), (0.7, 0.5, 1.5), (1.0, 0.5, 1.0), (0.7, 0.8, 1.0), (0.7, 0.8, 1.5))


def _arm(scale: Scale, lr: float, momentum: float, factor: float) -> Arm:
    inner = {"lr": factor * scale.one_worker_lr}
    return scale.diloco(workers=1, outer={"lr": lr, "momentum": momentum}, inner=inner)


def arms(scale: Scale) -> Arms:
    return {OUTER: _arm(scale, *TUNED.get(scale.name, TUNED["gpu"])), ONE: scale.one_worker()}


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    return (
        Claim(
            "Outer steps lower the perplexity of a single worker",
            "lower (Figure 9)",
            lambda m: m.change(OUTER, ONE),
            at_most=0.0,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 9: a single worker"),)


def tuning(scale: Scale) -> Mapping[str, Arms]:
    made = {f"outer {one[0]} / {one[1]}, inner × {one[2]:g}": _arm(scale, *one) for one in CANDIDATES}
    return {OUTER: made}


EXPERIMENT = Experiment(
    name="f9",
    title="Accelerating a single worker",
    source="DiLoCo, Figure 9",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
