"""Schedules: rounds that grow, outer rate and momentum over the run, a plain mean at the end, second moments."""

from typing import Any

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

PLAIN = "DiLoCo"
HALF = "half of H"
GROWING = "half of H, growing (QSR)"
WARM = "momentum warms up"
DECAY = "momentum decays"
LAST = "last round a plain mean"
ALL = "all three of the outer step"
MOMENTS = "second moments, every round"
RARELY = "second moments, every 6th"


def _half(scale: Scale) -> int:
    return max(1, round(scale.H / 2))


def _growth(scale: Scale) -> float:
    """Choose the growth so that the last rounds have five times the usual H."""
    return float((5 * scale.H) ** 0.5 * scale.inner_lr * scale.final_lr_ratio)


def arms(scale: Scale) -> Arms:
    warm: dict[str, Any] = {"warmup_rounds": max(1, scale.rounds() // 6), "start_momentum": 0.0}
    decay: dict[str, Any] = {"final_momentum": 0.0}
    last: dict[str, Any] = {"plain_rounds": 1}
    steps = max(1, round(scale.steps / _half(scale))) * _half(scale)
    return {
        PLAIN: scale.diloco(),
        LAST: scale.diloco(outer=last),
        DECAY: scale.diloco(outer=decay),
        WARM: scale.diloco(outer=warm),
        ALL: scale.diloco(outer=warm | decay | last),
        HALF: scale.diloco(sync={"num_inner_steps": _half(scale)}, steps=steps),
        GROWING: scale.diloco(sync={"num_inner_steps": _half(scale), "growth": _growth(scale)}, steps=steps),
        RARELY: scale.diloco(sync={"second_moment_every": 6}),
        MOMENTS: scale.diloco(sync={"second_moment_every": 1}),
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    published_by_name = {
        LAST: "–",
        DECAY: "–",
        WARM: "better (Pier, arXiv 2511.17849)",
        ALL: "–",
        MOMENTS: "better (DES-LOC)",
    }
    better_than_plain = [
        PublishedClaim(
            f"Better than DiLoCo as it is: {name}",
            published,
            lambda m, n=name: m.change(n, PLAIN),  # type: ignore[misc]
            at_most=0.0,
        )
        for name, published in published_by_name.items()
    ]
    return (
        *better_than_plain,
        PublishedClaim(
            "Second moments averaged in every 6th round are as good as in every round (0.5 %)",
            "as good (DES-LOC)",
            lambda m: m.change(RARELY, MOMENTS),
            at_most=0.005,
        ),
        PublishedClaim(
            "Rounds that grow as the learning rate falls cost at most 0.5 % over short ones throughout",
            "better (QSR, arXiv 2310.14423)",
            lambda m: m.change(GROWING, HALF),
            at_most=0.005,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (
        Curves("The course of the outer step", (PLAIN, WARM, DECAY, LAST, ALL)),
        Curves("Growing rounds, second moments", (PLAIN, HALF, GROWING, RARELY, MOMENTS)),
    )


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules",
    source="QSR, Pier, DES-LOC",
    arms=arms,
    claims=claims,
    figures=figures,
    note="A warm start is what f3 varies: the shared beginning is data-parallel.",
)
