"""Table 2 of the DiLoCo paper: one worker, eight times the batch, eight times the updates, DiLoCo."""

from collections.abc import Mapping

from diloco.lab.claims import Claim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

ONE, BATCH, UPDATES, DILOCO = "1× baseline", "8× batch", "8× updates", "DiLoCo"


def arms(scale: Scale) -> Arms:
    return {
        DILOCO: scale.diloco(),
        BATCH: scale.data_parallel(),
        ONE: scale.one_worker(),
        UPDATES: scale.one_worker(updates_multiplier=8),
    }


def claims(scale: Scale) -> tuple[Claim, ...]:
    del scale
    return (
        Claim(
            "DiLoCo has a lower perplexity than one worker alone",
            "−7.46 % (15.02 against 16.23)",
            lambda m: m.change(DILOCO, ONE),
            at_most=0.0,
            expected=15.02 / 16.23 - 1,
        ),
        Claim(
            "DiLoCo has a lower perplexity than data parallelism with the same steps and tokens",
            "−1.83 % (15.02 against 15.30)",
            lambda m: m.change(DILOCO, BATCH),
            at_most=0.0,
            expected=15.02 / 15.30 - 1,
        ),
        Claim(
            "DiLoCo is within 2 % of data parallelism with the same steps and tokens",
            "+0.37 % (OpenDiLoCo: 13.73 against 13.68)",
            lambda m: m.change(DILOCO, BATCH),
            at_most=0.02,
            expected=13.73 / 13.68 - 1,
        ),
        Claim(
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


def tuning(scale: Scale) -> Mapping[str, Arms]:
    """Inner rates of the three sides; outer rate and momentum of DiLoCo at the best of them."""
    factors = (0.5, 0.7, 1.0, 1.4, 2.0)
    return {
        ONE: {f"lr {lr:g}": scale.one_worker(inner={"lr": lr}) for lr in (scale.one_worker_lr * f for f in factors)},
        BATCH: {
            f"lr {lr:g}": scale.data_parallel(inner={"lr": lr}) for lr in (scale.data_parallel_lr * f for f in factors)
        },
        DILOCO: {f"lr {lr:g}": scale.diloco(inner={"lr": lr}) for lr in (scale.inner_lr * f for f in factors)},
        "outer": {
            f"outer {lr} / {momentum}": scale.diloco(outer={"lr": lr, "momentum": momentum})
            for lr, momentum in ((0.7, 0.9), (0.7, 0.8), (0.7, 0.7), (0.7, 0.5), (1.0, 0.8), (1.0, 0.6))
        },
    }


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
