"""Coarse codecs with and without error feedback (SparseLoCo, arXiv 2508.15706)."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

AVERAGING = {"optimizer": "sgd", "lr": 1.0}
"""Error feedback plays the part of the outer momentum."""


def _name(codec: str, feedback: bool) -> str:
    return f"{codec}, {'' if feedback else 'no '}error feedback"


def arms(scale: Scale) -> Arms:
    arms_by_name = {"fp32": scale.diloco(outer=AVERAGING)}
    for codec in ("topk", "2bit"):
        for feedback in (True, False):
            sync = {"codec": codec, "error_feedback": feedback}
            arms_by_name[_name(codec, feedback)] = scale.diloco(outer=AVERAGING, sync=sync)
    return arms_by_name


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    published_claims = []
    for codec in ("topk", "2bit"):
        published_claims.append(
            PublishedClaim(
                f"Error feedback lowers the perplexity with {codec}",
                "lower",
                lambda m, c=codec: m.change(_name(c, True), _name(c, False)),  # type: ignore[misc]
                at_most=0.0,
            )
        )
        published_claims.append(
            PublishedClaim(
                f"{codec} with error feedback is within 3 % of fp32",
                "as good or better",
                lambda m, c=codec: m.change(_name(c, True), "fp32"),  # type: ignore[misc]
                at_most=0.03,
            )
        )
    return tuple(published_claims)


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Sparse and 2-bit outer gradients"),)


EXPERIMENT = Experiment(
    name="error_feedback",
    title="Error feedback",
    source="SparseLoCo, arXiv 2508.15706",
    arms=arms,
    claims=claims,
    figures=figures,
)
