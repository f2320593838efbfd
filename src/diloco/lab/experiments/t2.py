"""Table 2 of the DiLoCo paper: one worker, eight times the batch, eight times the updates, DiLoCo."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale
from diloco.lab.tuning import INNER_LRS, MOMENTA, OUTER_LRS, Search

ONE = "1× baseline"
BATCH = "8× batch"
UPDATES = "8× updates"
DILOCO = "DiLoCo"


def arms(scale: Scale) -> Arms:
    return {
        DILOCO: scale.diloco(),
        BATCH: scale.data_parallel(),
        ONE: scale.one_worker(),
        UPDATES: scale.one_worker(updates_multiplier=8),
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return (
        PublishedClaim(
            "DiLoCo has a lower perplexity than one worker alone",
            "−7.46 % (15.02 against 16.23)",
            lambda m: m.change(DILOCO, ONE),
            at_most=0.0,
            expected=15.02 / 16.23 - 1,
        ),
        PublishedClaim(
            "DiLoCo has a lower perplexity than data parallelism with the same steps and tokens",
            "−1.83 % (15.02 against 15.30)",
            lambda m: m.change(DILOCO, BATCH),
            at_most=0.0,
            expected=15.02 / 15.30 - 1,
        ),
        PublishedClaim(
            "DiLoCo is within 2 % of data parallelism with the same steps and tokens",
            "+0.37 % (OpenDiLoCo: 13.73 against 13.68)",
            lambda m: m.change(DILOCO, BATCH),
            at_most=0.02,
            expected=13.73 / 13.68 - 1,
        ),
        PublishedClaim(
            "Eight times the updates of one worker are better than DiLoCo (and take eight times as long)",
            "−2.00 % (14.72 against 15.02)",
            lambda m: m.change(UPDATES, DILOCO),
            at_most=0.0,
            expected=14.72 / 15.02 - 1,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 2: the main result", (ONE, BATCH, DILOCO)),)


def tuning(scale: Scale) -> list[Search]:
    """Search the inner rates of the three sides after the shared beginning, and DiLoCo's outer rate and momentum."""
    return [
        Search(
            BATCH,
            {"lr": INNER_LRS},
            {"lr": scale.data_parallel_lr},
            lambda v: scale.data_parallel(inner={"lr": v["lr"]}),
            lambda v: {"data_parallel_lr": v["lr"]},
        ),
        Search(
            ONE,
            {"lr": INNER_LRS},
            {"lr": scale.one_worker_lr},
            lambda v: scale.one_worker(inner={"lr": v["lr"]}),
            lambda v: {"one_worker_lr": v["lr"]},
        ),
        Search(
            DILOCO,
            {"lr": INNER_LRS, "outer lr": OUTER_LRS, "outer momentum": MOMENTA},
            {"lr": scale.inner_lr, "outer lr": scale.outer_lr, "outer momentum": scale.outer_momentum},
            lambda v: scale.diloco(inner={"lr": v["lr"]}, outer={"lr": v["outer lr"], "momentum": v["outer momentum"]}),
            lambda v: {"inner_lr": v["lr"], "outer_lr": v["outer lr"], "outer_momentum": v["outer momentum"]},
        ),
    ]


EXPERIMENT = Experiment(
    name="t2",
    title="Trade-offs of training algorithms",
    source="DiLoCo, Table 2 and Figure 2",
    arms=arms,
    claims=claims,
    figures=figures,
    published={ONE: 16.23, BATCH: 15.30, UPDATES: 14.72, DILOCO: 15.02},
    tuning=tuning,
)
