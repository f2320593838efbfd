"""Figure 3 of the DiLoCo paper: the number of pre-training steps, the sum of all steps being the same."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

SHARES = (None, 0.0, 1 / 6, 0.5)
"""Shares of all steps; None: the scale's usual number. The paper has 0, 0.14, 0.27 and 0.55."""


def _steps(scale: Scale, share: float | None) -> int:
    """Pre-training steps; a whole number of rounds remains."""
    if share is None:
        return scale.pretraining_steps
    total = scale.pretraining_steps + scale.steps
    return total - min(round(total * (1 - share) / scale.H), total // scale.H) * scale.H


def _name(steps: int) -> str:
    return f"{steps} pre-training steps" if steps else "no pre-training"


def arms(scale: Scale) -> Arms:
    total = scale.pretraining_steps + scale.steps
    counts = [_steps(scale, share) for share in SHARES]
    return {_name(first): scale.diloco(pretraining_steps=first, steps=total - first) for first in counts}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    usual = _name(scale.pretraining_steps)
    fewer = _steps(scale, 1 / 6)
    return (
        PublishedClaim(
            "DiLoCo from scratch is within 2 % of DiLoCo after pre-training",
            "about +0.7 % (0.1 of perplexity)",
            lambda m: m.change(_name(0), usual),
            at_most=0.02,
            expected=0.007,
        ),
        PublishedClaim(
            f"{fewer} pre-training steps are within 1 % of the usual {scale.pretraining_steps}",
            "about 0",
            lambda m: m.change(_name(fewer), usual),
            at_least=-0.01,
            at_most=0.01,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    places = {name: float(arm.pretraining_steps) for name, arm in arms(scale).items()}
    title = "Figure 3: pre-training steps"
    return (Curves(title), Sweep(title, "pre-training steps", {"DiLoCo": places}))


EXPERIMENT = Experiment(
    name="f3",
    title="The number of pre-training steps",
    source="DiLoCo, Figure 3",
    arms=arms,
    claims=claims,
    figures=figures,
    note="Pre-training here is data-parallel with all workers' batches; the paper's has the batch of one worker.",
)
