"""What a scale must show before its tables mean anything: the gates, and the tuning of both sides.

The paper's regime is one in which more batch helps (one worker alone is 6 % above eight times the batch), frequent
rounds are as good as data parallelism, and even rare ones beat one worker. Each gate is such a statement, with outer
steps that were tuned for each H. A scale that misses one says so in its report; it is not shrunk until it passes.
"""

import math

from diloco.lab.arm import Arm
from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Experiment, Figure, Sweep
from diloco.lab.experiments import f9
from diloco.lab.scales import Scale
from diloco.lab.tuning import INNER_LRS, MOMENTA, OUTER_LRS, Search

ONE = "one worker"
BATCH = "8× batch, data-parallel"
ALONE = "one worker with outer steps"
WINDOW = (0.05, 0.25)
"""The least and the most by which one worker is to be above data parallelism: what DiLoCo can gain lies in between."""


def lengths(scale: Scale) -> tuple[int, int, int]:
    """Return a short, the usual and a long H: 10, 30 and 150 where H is 30."""
    return max(1, scale.H // 3), scale.H, 5 * scale.H


def _name(H: int) -> str:
    return f"DiLoCo, H = {H}"


def _diloco(scale: Scale, H: int, lr: float, momentum: float) -> Arm:
    steps = max(1, round(scale.steps / H)) * H
    return scale.diloco(sync={"num_inner_steps": H}, steps=steps, outer={"lr": lr, "momentum": momentum})


def arms(scale: Scale) -> Arms:
    short, usual, long = lengths(scale)
    return {
        _name(usual): scale.diloco(),
        _name(short): _diloco(scale, short, *scale.outer_steps["short H"]),
        _name(long): _diloco(scale, long, *scale.outer_steps["long H"]),
        BATCH: scale.data_parallel(),
        ONE: scale.one_worker(),
        ALONE: f9.arms(scale)[f9.OUTER],
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    short, usual, long = lengths(scale)
    return (
        PublishedClaim(
            "Gate: one worker alone is 5 to 25 % above data parallelism",
            "+6.1 % (16.23 against 15.30)",
            lambda m: m.change(ONE, BATCH),
            at_least=WINDOW[0],
            at_most=WINDOW[1],
            expected=16.23 / 15.30 - 1,
        ),
        PublishedClaim(
            f"Gate: H = {short} is within 0.5 % of data parallelism",
            "–",
            lambda m: m.change(_name(short), BATCH),
            at_most=0.005,
        ),
        PublishedClaim(
            f"Gate: even H = {long} beats one worker",
            "better (Figure 4)",
            lambda m: m.change(_name(long), ONE),
            at_most=0.0,
        ),
        PublishedClaim(
            "Gate: outer steps of a single worker cost nothing",
            "better (Figure 9)",
            lambda m: m.change(ALONE, ONE),
            at_most=0.0,
        ),
        PublishedClaim(
            f"H = {usual} keeps at least half of the window between one worker and data parallelism",
            "130 % (15.02 between 16.23 and 15.30)",
            lambda m: m.window_kept(_name(usual), ONE, BATCH),
            at_least=0.5,
            expected=math.log(16.23 / 15.02) / math.log(16.23 / 15.30),
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    places = {_name(H): float(H) for H in lengths(scale)}
    return (Sweep("Perplexity by H", "H, inner steps between rounds", {"DiLoCo": places}, x_log=True),)


def tuning(scale: Scale) -> list[Search]:
    """Search the rate of a whole data-parallel run, whose first third is the shared pre-training of all arms."""
    return [
        Search(
            BATCH,
            {"lr": INNER_LRS},
            {"lr": scale.pretraining_lr},
            lambda v: scale.changed(_data_parallel_rates(v["lr"])).data_parallel(),
            lambda v: _data_parallel_rates(v["lr"]),
        )
    ]


def _data_parallel_rates(lr: float) -> dict[str, float]:
    return {"pretraining_lr": lr, "data_parallel_lr": lr}


def tune_lengths(scale: Scale) -> list[Search]:
    """Search the outer rate and momentum of the short and the long H."""
    short, _, long = lengths(scale)
    return [_search(scale, "short H", short), _search(scale, "long H", long)]


def _search(scale: Scale, key: str, H: int) -> Search:
    lr, momentum = scale.outer_steps[key]
    return Search(
        _name(H),
        {"outer lr": OUTER_LRS, "outer momentum": MOMENTA},
        {"outer lr": lr, "outer momentum": momentum},
        lambda v: _diloco(scale, H, v["outer lr"], v["outer momentum"]),
        lambda v: {"outer_steps": {key: (v["outer lr"], v["outer momentum"])}},
    )


EXPERIMENT = Experiment(
    name="regime",
    title="The regime: gates and tuning",
    source="DiLoCo, Table 2, Figures 4 and 9",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
    note="A gate that is missed is a property of this scale, and is to be read beside every table below.",
)
