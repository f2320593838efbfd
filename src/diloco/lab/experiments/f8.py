"""Figure 8 of the DiLoCo paper: outer gradients dropped with some probability (non-i.i.d. at 50 %: f5.py)."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

PARTS = (0.0, 0.5, 0.3, 0.1)
LARGEST = {0.1: 0.01, 0.3: 0.02, 0.5: 0.03}
BY_TOKENS = "50% dropped, weighted by tokens"


def _name(part: float) -> str:
    return f"{part:.0%} dropped"


def arms(scale: Scale) -> Arms:
    """The paper counts every contribution that arrives alike; a swarm counts it by the steps behind it."""
    made = {_name(part): scale.diloco(drop=part, missed="uniform") if part else scale.diloco() for part in PARTS}
    return made | {BY_TOKENS: scale.diloco(drop=0.5)}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    by_tokens = PublishedClaim(
        "With half of the communication dropped, weights by tokens are better than uniform ones",
        "–",
        lambda m: m.change(BY_TOKENS, _name(0.5)),
        at_most=0.0,
    )
    published = {0.1: "small", 0.3: "small", 0.5: "+2.1 % (non-i.i.d.)"}
    dropped = tuple(
        PublishedClaim(
            f"Dropping {part:.0%} of the communication costs at most {most:.0%} of perplexity",
            published[part],
            lambda m, p=part: m.change(_name(p), _name(0.0)),  # type: ignore[misc]
            at_most=most,
            expected=0.021 if part == 0.5 else None,
        )
        for part, most in LARGEST.items()
    )
    return (*dropped, by_tokens)


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    places = {_name(part): 100 * part for part in sorted(PARTS)}
    title = "Figure 8: dropped communication"
    return (Curves(title, (*places, BY_TOKENS)), Sweep(title, "% of contributions dropped", {"DiLoCo": places}))


EXPERIMENT = Experiment(
    name="f8",
    title="Dropped communication",
    source="DiLoCo, Figure 8",
    arms=arms,
    claims=claims,
    figures=figures,
)
