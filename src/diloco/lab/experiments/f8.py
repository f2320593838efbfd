"""Figure 8 of the DiLoCo paper: outer gradients dropped with some probability (non-i.i.d. at 50 %: f5.py)."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

DROPPED = (0.0, 0.5, 0.3, 0.1)
LARGEST_COST = {0.1: 0.01, 0.3: 0.02, 0.5: 0.03}
BY_TOKENS = "50% dropped, weighted by tokens"


def _name(dropped: float) -> str:
    return f"{dropped:.0%} dropped"


def arms(scale: Scale) -> Arms:
    """Return the paper's arms, in which all contributions that arrive count alike, and one in which a contribution
    counts by the steps behind it, as in a swarm."""
    arms_by_name = {
        _name(dropped): scale.diloco(drop=dropped, missed="uniform") if dropped else scale.diloco()
        for dropped in DROPPED
    }
    return arms_by_name | {BY_TOKENS: scale.diloco(drop=0.5)}


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
            f"Dropping {share:.0%} of the communication costs at most {limit:.0%} of perplexity",
            published[share],
            lambda m, p=share: m.change(_name(p), _name(0.0)),  # type: ignore[misc]
            at_most=limit,
            expected=0.021 if share == 0.5 else None,
        )
        for share, limit in LARGEST_COST.items()
    )
    return (*dropped, by_tokens)


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    places = {_name(dropped): 100 * dropped for dropped in sorted(DROPPED)}
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
