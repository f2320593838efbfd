"""Figure 4 of the DiLoCo paper: H, the inner steps between two rounds."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.experiments.regime import tune_lengths
from diloco.lab.fits import Results, doubling_line
from diloco.lab.report.pages import Block
from diloco.lab.scales import Scale

FACTORS = (1.0, 1 / 2, 10.0, 1 / 3, 5.0, 1 / 5)
"""Multiples of the scale's H; the paper has 50 to 2,000 around its 500."""
SHORT = 1 / 2
LONG = 10.0
"""The two lengths that are compared: twenty times apart, as the paper's 50 and 1,000."""


def _lengths(scale: Scale) -> list[int]:
    return [max(1, round(scale.H * factor)) for factor in FACTORS]


def _name(H: int) -> str:
    return f"H = {H}"


def arms(scale: Scale) -> Arms:
    return {
        _name(H): scale.diloco(sync={"num_inner_steps": H}, steps=max(1, round(scale.steps / H)) * H)
        for H in _lengths(scale)
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    short = round(scale.H * SHORT)
    long = round(scale.H * LONG)
    return (
        PublishedClaim(
            f"H = {long} costs at most 3 % of perplexity over H = {short}, with {long // short} times fewer rounds",
            "+2.9 % (H = 1,000 over 50, 20 times fewer)",
            lambda m: m.change(_name(long), _name(short)),
            at_most=0.03,
            expected=0.029,
        ),
        PublishedClaim(
            f"Communicating more often is better: H = {short} beats H = {long}",
            "−2.8 %",
            lambda m: m.change(_name(short), _name(long)),
            at_most=0.0,
            expected=-0.028,
        ),
        PublishedClaim(
            f"Diminishing returns below the usual H = {scale.H}: half of it gains at most 1 %",
            "under 1 % (H = 250 and 500)",
            lambda m: m.change(_name(scale.H), _name(round(scale.H / 2))),
            at_most=0.01,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    places = {_name(H): float(H) for H in sorted(_lengths(scale))}
    return (
        Curves("Figure 4: communication frequency", tuple(places)),
        Sweep("Perplexity by H", "H, inner steps between rounds", {"DiLoCo": places}, x_log=True),
    )


def analysis(scale: Scale, results: Results) -> list[Block]:
    """Shorter H do not follow the line: there outer steps are too many and too small."""
    places = {_name(H): (float(H),) for H in _lengths(scale) if scale.H <= H}
    return doubling_line((f"H, from {scale.H} on",), places, results)


EXPERIMENT = Experiment(
    name="f4",
    title="Communication frequency",
    source="DiLoCo, Figure 4",
    arms=arms,
    claims=claims,
    figures=figures,
    analysis=analysis,
    tuning=tune_lengths,
    note="One outer rate and momentum for all H, as in the paper; in the table `regime` the short and the long H have "
    "their own, which `tune f4` finds.",
)
