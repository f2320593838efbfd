"""Figures 10 and 11 of the DiLoCo paper: the cosine similarity of the workers' outer gradients."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Experiment, Figure, Similarity
from diloco.lab.scales import Scale

IID = "i.i.d."
NON_IID = "non-i.i.d."
NON_IID_4 = "non-i.i.d., 4 workers"


def _lengths(scale: Scale) -> tuple[int, int, int]:
    """Return half of the usual H, the usual one and twice that: the paper's 250, 500 and 1,000."""
    return max(1, scale.H // 2), scale.H, 2 * scale.H


def _name(side: str, H: int) -> str:
    return f"{side}, H = {H}"


def arms(scale: Scale) -> Arms:
    arms_by_name: Arms = {}
    for side, data in ((IID, "iid"), (NON_IID, "shards")):
        for H in sorted(_lengths(scale), key=lambda H: H != scale.H):
            arms_by_name[_name(side, H)] = scale.diloco(data=data, sync={"num_inner_steps": H})
    return arms_by_name | {NON_IID_4: scale.diloco(data="shards", workers=4)}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    short, usual, long = _lengths(scale)
    at_usual = _name(NON_IID, usual)
    published_claims = [
        PublishedClaim(
            f"Outer gradients of more inner steps are more alike ({side}, H = {long} against {short})",
            "more alike (Figure 10)",
            lambda m, s=side: m.figure(_name(s, long), "cosine") - m.figure(_name(s, short), "cosine"),  # type: ignore[misc]
            unit="",
            at_least=0.0,
        )
        for side in (IID, NON_IID)
    ]
    published_claims += [
        PublishedClaim(
            "Outer gradients are more alike with the same text than with different texts",
            "more alike (Figure 10)",
            lambda m: m.figure(_name(IID, usual), "cosine") - m.figure(at_usual, "cosine"),
            unit="",
            at_least=0.0,
        ),
        PublishedClaim(
            "Outer gradients of 8 workers with different texts are less alike than those of 4",
            "less alike (Figure 11)",
            lambda m: m.figure(at_usual, "cosine") - m.figure(NON_IID_4, "cosine"),
            unit="",
            at_most=0.0,
        ),
        PublishedClaim(
            "The norm of the mean outer gradient falls as 1/√k: 4 workers have √2 times that of 8",
            "1.414",
            lambda m: m.figure(NON_IID_4, "mean_norm") / m.figure(at_usual, "mean_norm"),
            unit="",
            at_least=1.2,
            at_most=1.6,
            expected=1.414,
        ),
    ]
    return tuple(published_claims)


def figures(scale: Scale) -> tuple[Figure, ...]:
    return (
        Similarity("Figure 10a: i.i.d.", tuple(_name(IID, H) for H in _lengths(scale))),
        Similarity("Figure 10b: non-i.i.d.", tuple(_name(NON_IID, H) for H in _lengths(scale))),
        Similarity("Figure 11: number of replicas", (NON_IID_4, _name(NON_IID, scale.H))),
    )


EXPERIMENT = Experiment(
    name="f10",
    title="Similarity of outer gradients",
    source="DiLoCo, Figures 10 and 11",
    arms=arms,
    claims=claims,
    figures=figures,
    text="domains",
)
