"""Figure 7 of the DiLoCo paper: workers that come and go, in six schedules."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

LOCAL = "constant local (1)"
ALL = "constant distributed (8)"
SCHEDULES = {
    "doubling (4, 8)": (4, 8),
    "halving (8, 4)": (8, 4),
    "ramping up (1 to 8)": (1, 2, 3, 4, 5, 6, 7, 8),
    "ramping down (8 to 1)": (8, 7, 6, 5, 4, 3, 2, 1),
}


def arms(scale: Scale) -> Arms:
    arms_by_name = {ALL: scale.diloco()}
    arms_by_name |= {name: scale.diloco(active_workers=counts) for name, counts in SCHEDULES.items()}
    return arms_by_name | {LOCAL: scale.diloco(workers=1)}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    doubling, halving, up, down = SCHEDULES
    return (
        PublishedClaim(
            "Doubling and halving, with the same compute, are within 2 % of each other",
            "similar",
            lambda m: m.change(doubling, halving),
            at_least=-0.02,
            at_most=0.02,
        ),
        PublishedClaim(
            "Ramping up and ramping down, with the same compute, are within 2 % of each other",
            "similar",
            lambda m: m.change(up, down),
            at_least=-0.02,
            at_most=0.02,
        ),
        PublishedClaim(
            "8 workers throughout are better than doubling, which has three quarters of the compute",
            "better",
            lambda m: m.change(ALL, doubling),
            at_most=0.0,
        ),
        PublishedClaim(
            "Ramping up is better than one worker, which has less compute",
            "better",
            lambda m: m.change(up, LOCAL),
            at_most=0.0,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 7: adaptive compute"),)


EXPERIMENT = Experiment(
    name="f7",
    title="Adaptive compute",
    source="DiLoCo, Figure 7",
    arms=arms,
    claims=claims,
    figures=figures,
)
