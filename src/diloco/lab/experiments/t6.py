"""Table 6 of the DiLoCo paper: outer gradients pruned per neuron (methods/pruning.py says in which reading)."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

PUBLISHED = {0.0: 15.02, 0.25: 15.01, 0.5: 15.08, 0.75: 15.27}
LARGEST_COST = {0.25: 0.005, 0.5: 0.01, 0.75: 0.03}
"""What counts as the published change: −0.06 %, +0.39 %, +1.66 % and some room."""


def _name(pruned: float) -> str:
    return f"{pruned:.0%} pruned"


def arms(scale: Scale) -> Arms:
    return {_name(pruned): scale.diloco(sync={"prune": pruned} if pruned else {}) for pruned in PUBLISHED}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return tuple(
        PublishedClaim(
            f"Pruning {share:.0%} of the outer gradients costs at most {limit:.1%} of perplexity",
            f"{PUBLISHED[share] / PUBLISHED[0.0] - 1:+.2%}".replace("-", "−"),
            lambda m, p=share: m.change(_name(p), _name(0.0)),  # type: ignore[misc]
            at_most=limit,
            expected=PUBLISHED[share] / PUBLISHED[0.0] - 1,
        )
        for share, limit in LARGEST_COST.items()
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    places = {_name(pruned): 100 * pruned for pruned in PUBLISHED}
    return (
        Sweep("Table 6: pruned outer gradients", "% of each neuron's values pruned", {"DiLoCo": places}),
        Curves("The curves"),
    )


EXPERIMENT = Experiment(
    name="t6",
    title="Pruned outer gradients",
    source="DiLoCo, Table 6",
    arms=arms,
    claims=claims,
    figures=figures,
    published={_name(part): value for part, value in PUBLISHED.items()},
)
