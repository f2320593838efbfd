"""Figure 6 of the DiLoCo paper: outer optimizers."""

from typing import Any

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale
from diloco.lab.tuning import MOMENTA, OUTER_LRS, Search

NESTEROV = "Nesterov"
SGD = "SGD (FedAvg)"
SGDM = "SGDM"
ADAM = "Adam (FedOpt)"
KINDS = {SGD: "sgd", SGDM: "sgdm", ADAM: "adam"}


def _outer(kind: str, lr: float, momentum: float) -> dict[str, Any]:
    """Return the table `outer` of one optimizer: Adam takes the momentum as its beta1, and SGD takes none."""
    numbers: dict[str, dict[str, float]] = {
        "sgd": {},
        "sgdm": {"momentum": momentum},
        "adam": {"beta1": momentum, "beta2": 0.95, "epsilon": 0.1},
    }
    return {"optimizer": kind, "lr": lr} | numbers[kind]


def arms(scale: Scale) -> Arms:
    tuned = {name: scale.diloco(outer=_outer(kind, *scale.outer_steps[kind])) for name, kind in KINDS.items()}
    return {NESTEROV: scale.diloco()} | tuned


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return tuple(
        PublishedClaim(
            f"Nesterov has a lower perplexity than {name}",
            "better (Figure 6)",
            lambda m, n=name: m.change(NESTEROV, n),  # type: ignore[misc]
            at_most=0.0,
        )
        for name in KINDS
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 6: outer optimizers"),)


def tuning(scale: Scale) -> list[Search]:
    return [_search(scale, name, kind) for name, kind in KINDS.items()]


def _search(scale: Scale, name: str, kind: str) -> Search:
    lr, momentum = scale.outer_steps[kind]
    ladders = {"outer lr": OUTER_LRS} | ({"outer momentum": MOMENTA} if kind == "sgdm" else {})
    return Search(
        name,
        ladders,
        {"outer lr": lr, "outer momentum": momentum},
        lambda v: scale.diloco(outer=_outer(kind, v["outer lr"], v.get("outer momentum", momentum))),
        lambda v: {"outer_steps": {kind: (v["outer lr"], v.get("outer momentum", momentum))}},
    )


EXPERIMENT = Experiment(
    name="f6",
    title="Outer optimizers",
    source="DiLoCo, Figure 6",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
