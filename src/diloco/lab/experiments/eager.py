"""Eager and delayed updates by the size of the outer step: a mean that is one round old needs a smaller one."""

import math
from typing import Any

from diloco.lab.arm import Arm
from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale
from diloco.lab.tuning import MOMENTA, OUTER_LRS, Search

NUMBERS = ((0.7, 0.8), (0.7, 0.5), (0.4, 0.5))
"""Outer rate and momentum: the step is rate / (1 − momentum), 3.5, 1.4 and 0.8."""
METHODS = {"DiLoCo": "none", "eager": "eager", "delayed": "delayed"}


def _arm(scale: Scale, method: str, numbers: tuple[float, float]) -> Arm:
    sync: dict[str, Any] = {} if method == "DiLoCo" else {"outer_overlap": METHODS[method]}
    return scale.diloco(outer={"lr": numbers[0], "momentum": numbers[1]}, sync=sync)


def tuned(scale: Scale, method: str) -> Arm:
    """Eager or delayed updates with the outer rate and momentum that were found for eager ones."""
    return _arm(scale, method, scale.outer_steps["eager"])


def _name(method: str, numbers: tuple[float, float]) -> str:
    return f"{method}, {numbers[0]} / {numbers[1]}"


def arms(scale: Scale) -> Arms:
    return {_name(method, numbers): _arm(scale, method, numbers) for numbers in NUMBERS for method in METHODS}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    published_claims = []
    for lr, momentum in NUMBERS:
        numbers = (lr, momentum)
        published_claims.append(
            PublishedClaim(
                f"Eager updates with {lr} / {momentum} cost at most 3 % over DiLoCo with the same",
                "+0.02 nats (500M)",
                lambda m, n=numbers: m.change(_name("eager", n), _name("DiLoCo", n)),  # type: ignore[misc]
                at_most=0.03,
                expected=math.expm1(0.02),
            )
        )
        published_claims.append(
            PublishedClaim(
                f"Eager updates are better than naive delay with {lr} / {momentum}",
                "−0.32 nats (500M)",
                lambda m, n=numbers: m.change(_name("eager", n), _name("delayed", n)),  # type: ignore[misc]
                at_most=0.0,
                expected=math.expm1(-0.32),
            )
        )
    return tuple(published_claims)


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (
        Curves("Outer step 0.7 / 0.5", tuple(_name(method, (0.7, 0.5)) for method in METHODS)),
        Curves("Outer step 0.4 / 0.5", tuple(_name(method, (0.4, 0.5)) for method in METHODS)),
    )


def tuning(scale: Scale) -> list[Search]:
    """Eager updates only: naive delay is compared at the same numbers."""
    lr, momentum = scale.outer_steps["eager"]
    return [
        Search(
            "eager",
            {"outer lr": OUTER_LRS, "outer momentum": MOMENTA},
            {"outer lr": lr, "outer momentum": momentum},
            lambda v: _arm(scale, "eager", (v["outer lr"], v["outer momentum"])),
            lambda v: {"outer_steps": {"eager": (v["outer lr"], v["outer momentum"])}},
        )
    ]


EXPERIMENT = Experiment(
    name="eager",
    title="Eager and delayed updates by outer step",
    source="arXiv 2502.12996",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
