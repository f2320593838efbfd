"""Figure 6 of the DiLoCo paper: outer optimizers."""

from collections.abc import Mapping
from typing import Any

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

NESTEROV, SGD, SGDM, ADAM = "Nesterov", "SGD (FedAvg)", "SGDM", "Adam (FedOpt)"
OTHERS = (SGD, SGDM, ADAM)
_ADAM = {"beta1": 0.9, "beta2": 0.95, "epsilon": 0.1}
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    SGD: {f"lr {lr}": {"optimizer": "sgd", "lr": lr} for lr in (1.0, 1.4)},
    SGDM: {
        f"lr {lr} / {momentum}": {"optimizer": "sgdm", "lr": lr, "momentum": momentum}
        for lr, momentum in ((0.3, 0.9), (0.7, 0.5), (0.4, 0.8))
    },
    ADAM: {f"lr {lr}": {"optimizer": "adam", "lr": lr} | _ADAM for lr in (0.6, 0.3, 0.1)},
}
"""A part of the grid of the paper's Table 5, and more."""
TUNED: dict[str, dict[str, str]] = {
    "smoke": {SGD: "lr 1.0", SGDM: "lr 0.3 / 0.9", ADAM: "lr 0.3"},
    "cpu": {SGD: "lr 1.4", SGDM: "lr 0.4 / 0.8", ADAM: "lr 0.3"},
    "gpu": {SGD: "lr 1.4", SGDM: "lr 0.4 / 0.8", ADAM: "lr 0.3"},
}
"""The best of `tuning` at gpu scale; Nesterov's numbers are the scale's."""


def arms(scale: Scale) -> Arms:
    best = TUNED.get(scale.name, TUNED["gpu"])
    return {NESTEROV: scale.diloco()} | {name: scale.diloco(outer=CANDIDATES[name][best[name]]) for name in OTHERS}


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    return tuple(
        Claim(
            f"Nesterov has a lower perplexity than {name}",
            "better (Figure 6)",
            lambda m, n=name: m.change(NESTEROV, n),  # type: ignore[misc]
            at_most=0.0,
        )
        for name in OTHERS
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 6: outer optimizers"),)


def tuning(scale: Scale) -> Mapping[str, Arms]:
    return {name: {label: scale.diloco(outer=outer) for label, outer in CANDIDATES[name].items()} for name in OTHERS}


EXPERIMENT = Experiment(
    name="f6",
    title="Outer optimizers",
    source="DiLoCo, Figure 6",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
