"""Figure 3 of the DiLoCo paper: the number of pre-training steps, the sum of all steps being the same."""

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

PARTS = {"1/3": 1 / 3, "0": 0.0, "1/6": 1 / 6, "1/2": 0.5}
"""Of all steps. The paper's 0, 12k, 24k and 48k of 88k are 0, 0.14, 0.27 and 0.55."""


def _steps(scale: Scale, part: float) -> int:
    """A whole number of rounds remains."""
    total = scale.pretraining_steps + scale.steps
    return total - round(total * (1 - part) / scale.H) * scale.H


def _name(part: str) -> str:
    return "no pre-training" if part == "0" else f"{part} pre-training"


def arms(scale: Scale) -> Arms:
    total, made = scale.pretraining_steps + scale.steps, {}
    for name, part in PARTS.items():
        first = scale.pretraining_steps if name == "1/3" else _steps(scale, part)
        made[_name(name)] = scale.diloco(pretraining_steps=first, steps=total - first)
    return made


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    usual = _name("1/3")
    return (
        Claim(
            "DiLoCo from scratch is within 2 % of DiLoCo after pre-training",
            "about +0.7 % (0.1 of perplexity)",
            lambda m: m.change(_name("0"), usual),
            at_most=0.02,
        ),
        Claim(
            "Half as much pre-training is within 1 %",
            "about 0",
            lambda m: m.change(_name("1/6"), usual),
            at_least=-0.01,
            at_most=0.01,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    places = {_name(name): float(arm.pretraining_steps) for name, arm in zip(PARTS, arms(scale).values(), strict=True)}
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
