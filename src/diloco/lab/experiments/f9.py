"""Figure 9 of the DiLoCo paper: outer steps of a single worker."""

from collections.abc import Mapping

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

ONE, OUTER = "1× baseline", "one worker with outer steps"
TUNED = {"lr": 0.7, "momentum": 0.5}
"""The best of `tuning` at gpu scale."""


def arms(scale: Scale) -> Arms:
    return {OUTER: scale.diloco(workers=1, outer=TUNED, inner={"lr": scale.one_worker_lr}), ONE: scale.one_worker()}


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
    return {
        OUTER: {
            f"outer {lr} / {momentum}, inner {inner:g}": scale.diloco(
                workers=1, outer={"lr": lr, "momentum": momentum}, inner={"lr": inner}
            )
            for lr, momentum in ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5))
            for inner in (scale.one_worker_lr, 1.5 * scale.one_worker_lr)
        }
    }


EXPERIMENT = Experiment(
    name="f9",
    title="Accelerating a single worker",
    source="DiLoCo, Figure 9",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
