"""Figure 6 of the DiLoCo paper: outer optimizers."""

from collections.abc import Mapping

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

NESTEROV, SGD, SGDM, ADAM = "Nesterov", "SGD (FedAvg)", "SGDM", "Adam (FedOpt)"
TUNED = {
    SGD: {"optimizer": "sgd", "lr": 1.0},
    SGDM: {"optimizer": "sgdm", "lr": 0.3, "momentum": 0.9},
    ADAM: {"optimizer": "adam", "lr": 0.3, "beta1": 0.9, "beta2": 0.95, "epsilon": 0.1},
}
"""The best of `tuning` at gpu scale; Nesterov's numbers are the scale's."""


def arms(scale: Scale) -> Arms:
    return {NESTEROV: scale.diloco()} | {name: scale.diloco(outer=outer) for name, outer in TUNED.items()}


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    return tuple(
        Claim(
            f"Nesterov has a lower perplexity than {name}",
            "better (Figure 6)",
            lambda m, n=name: m.change(NESTEROV, n),  # type: ignore[misc]
            at_most=0.0,
        )
        for name in TUNED
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 6: outer optimizers"),)


def tuning(scale: Scale) -> Mapping[str, Arms]:
    """A part of the grid of the paper's Table 5."""
    momentum = ((0.3, 0.9), (0.7, 0.5))
    return {
        SGD: {f"lr {lr}": scale.diloco(outer={"optimizer": "sgd", "lr": lr}) for lr in (1.0,)},
        SGDM: {
            f"lr {lr} / {beta}": scale.diloco(outer={"optimizer": "sgdm", "lr": lr, "momentum": beta})
            for lr, beta in momentum
        },
        ADAM: {f"lr {lr}": scale.diloco(outer=TUNED[ADAM] | {"lr": lr}) for lr in (0.3, 0.1)},
    }


EXPERIMENT = Experiment(
    name="f6",
    title="Outer optimizers",
    source="DiLoCo, Figure 6",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
