"""Figure 9 of the DiLoCo paper: outer steps of a single worker."""

from diloco.lab.arm import Arm
from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale
from diloco.lab.tuning import MOMENTA, OUTER_LRS, Search

ONE = "1× baseline"
OUTER = "one worker with outer steps"


def _arm(scale: Scale, lr: float, momentum: float) -> Arm:
    """Make an arm with outer steps; its inner rate is that of one worker without them."""
    inner = {"lr": scale.one_worker_lr}
    return scale.diloco(workers=1, outer={"lr": lr, "momentum": momentum}, inner=inner)


def arms(scale: Scale) -> Arms:
    return {OUTER: _arm(scale, *scale.outer_steps["one worker"]), ONE: scale.one_worker()}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return (
        PublishedClaim(
            "Outer steps lower the perplexity of a single worker",
            "lower (Figure 9)",
            lambda m: m.change(OUTER, ONE),
            at_most=0.0,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 9: a single worker"),)


def tuning(scale: Scale) -> list[Search]:
    lr, momentum = scale.outer_steps["one worker"]
    return [
        Search(
            OUTER,
            {"outer lr": OUTER_LRS, "outer momentum": MOMENTA},
            {"outer lr": lr, "outer momentum": momentum},
            lambda v: _arm(scale, v["outer lr"], v["outer momentum"]),
            lambda v: {"outer_steps": {"one worker": (v["outer lr"], v["outer momentum"])}},
        )
    ]


EXPERIMENT = Experiment(
    name="f9",
    title="Accelerating a single worker",
    source="DiLoCo, Figure 9",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
