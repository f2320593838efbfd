"""Figure 8 of the DiLoCo paper: outer gradients dropped with some probability (non-i.i.d. at 50 %: f5.py)."""

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

PARTS = (0.0, 0.5, 0.1, 0.3)
LARGEST = {0.1: 0.01, 0.3: 0.02, 0.5: 0.03}


def _name(part: float) -> str:
    return f"{part:.0%} dropped"


def arms(scale: Scale) -> Arms:
    return {_name(part): scale.diloco(drop=part) for part in PARTS}


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    published = {0.1: "small", 0.3: "small", 0.5: "+2.1 % (non-i.i.d.)"}
    return tuple(
        Claim(
            f"Dropping {part:.0%} of the communication costs at most {most:.0%} of perplexity",
            published[part],
            lambda m, p=part: m.change(_name(p), _name(0.0)),  # type: ignore[misc]
            at_most=most,
        )
        for part, most in LARGEST.items()
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    places = {_name(part): 100 * part for part in sorted(PARTS)}
    title = "Figure 8: dropped communication"
    return (Curves(title, tuple(places)), Sweep(title, "% of contributions dropped", {"DiLoCo": places}))


EXPERIMENT = Experiment(
    name="f8",
    title="Dropped communication",
    source="DiLoCo, Figure 8",
    arms=arms,
    claims=claims,
    figures=figures,
)
