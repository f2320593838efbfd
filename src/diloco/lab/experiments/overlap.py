"""Overlap by inner steps: what τ steps of travel cost, with the mean in place of the parameters or half and half."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

PLAIN = "no overlap"
MIXING = (0.0, 0.25, 0.5)
STEPS = (1, 5, 10)


def _steps(scale: Scale) -> list[int]:
    return sorted({min(steps, scale.H - 1) for steps in STEPS})


def _name(steps: int, mixing: float) -> str:
    return f"τ = {steps}, α = {mixing:g}"


def arms(scale: Scale) -> Arms:
    arms_by_name = {PLAIN: scale.diloco()}
    for steps in sorted(_steps(scale), reverse=True):
        for mixing in MIXING:
            arms_by_name[_name(steps, mixing)] = scale.diloco(sync={"overlap_steps": steps, "mixing": mixing})
    return arms_by_name


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    return tuple(
        PublishedClaim(
            f"Overlap with {_name(steps, mixing)} costs at most 1 % of perplexity",
            "nothing (τ up to 5, α = 0.5)" if steps <= 5 else "–",
            lambda m, t=steps, a=mixing: m.change(_name(t, a), PLAIN),  # type: ignore[misc]
            at_most=0.01,
        )
        for mixing in MIXING
        for steps in _steps(scale)
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    lines = {
        f"α = {mixing:g}": {PLAIN: 0.0} | {_name(steps, mixing): float(steps) for steps in _steps(scale)}
        for mixing in MIXING
    }
    longest = _steps(scale)[-1]
    return (
        Sweep("Overlap by inner steps", "τ, inner steps from post to merge", lines),
        Curves("The longest overlap", (PLAIN, *(_name(longest, mixing) for mixing in MIXING))),
    )


EXPERIMENT = Experiment(
    name="overlap",
    title="Overlap by inner steps",
    source="Streaming DiLoCo, arXiv 2501.18512",
    arms=arms,
    claims=claims,
    figures=figures,
    note="One fragment, and DiLoCo's own outer rate and momentum in all arms.",
)
