"""Eager updates and the size of the outer step: a mean that is one round old needs a smaller one."""

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

NUMBERS = ((0.7, 0.8), (0.7, 0.5), (0.4, 0.5))
"""Outer rate and momentum: the step is rate / (1 − momentum), 3.5, 1.4 and 0.8."""


def _name(method: str, lr: float, momentum: float) -> str:
    return f"{method}, {lr} / {momentum}"


def arms(scale: Scale) -> Arms:
    made: Arms = {}
    for lr, momentum in NUMBERS:
        outer = {"lr": lr, "momentum": momentum}
        made[_name("DiLoCo", lr, momentum)] = scale.diloco(outer=outer)
        made[_name("eager", lr, momentum)] = scale.diloco(outer=outer, sync={"outer_overlap": "eager"})
    return made


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    return tuple(
        Claim(
            f"Eager updates with {lr} / {momentum} cost at most 3 % over DiLoCo with the same",
            "+0.02 nats (500M)",
            lambda m, n=(lr, momentum): m.change(_name("eager", *n), _name("DiLoCo", *n)),  # type: ignore[misc]
            at_most=0.03,
        )
        for lr, momentum in NUMBERS
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Eager updates by outer step"),)


EXPERIMENT = Experiment(
    name="eager",
    title="Eager updates and the outer step",
    source="arXiv 2502.12996",
    arms=arms,
    claims=claims,
    figures=figures,
)
