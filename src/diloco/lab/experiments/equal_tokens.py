"""DiLoCo against data parallelism with equal tokens: the same batch, or smaller batches and more updates."""

from diloco.lab.arm import Arm
from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

DILOCO = "DiLoCo, 8 workers"
SIZES = (8, 4, 2, 1)
"""Data-parallel batches in units of a worker's; the updates are 8 over it."""


def _name(size: int) -> str:
    return f"data-parallel, {size}× batch, {8 // size}× updates"


def _data_parallel(scale: Scale, size: int) -> Arm:
    """Make a data-parallel arm. Between the tuned rates of one batch and of eight the rate follows the root of the
    batch."""
    if size == 1:
        return scale.one_worker(updates_multiplier=8, inner={"lr": scale.one_worker_lr})
    lr = max(scale.one_worker_lr, scale.data_parallel_lr * (size / 8) ** 0.5)
    return scale.data_parallel(workers=size, updates_multiplier=8 // size, inner={"lr": lr})


def arms(scale: Scale) -> Arms:
    return {DILOCO: scale.diloco()} | {_name(size): _data_parallel(scale, size) for size in SIZES}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return tuple(
        PublishedClaim(
            f"With equal tokens, {8 // size} times the updates with {size}× the batch beat DiLoCo"
            if size < 8
            else "With equal tokens and steps, DiLoCo is within 2 % of data parallelism",
            {8: "−1.83 %", 1: "−2.00 %"}.get(size, "–"),
            (lambda m, s=size: m.change(_name(s), DILOCO)) if size < 8 else (lambda m: m.change(DILOCO, _name(8))),  # type: ignore[misc]
            at_most=0.0 if size < 8 else 0.02,
            expected={8: -0.0183, 1: -0.0200}.get(size),
        )
        for size in SIZES
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Equal tokens"),)


EXPERIMENT = Experiment(
    name="equal_tokens",
    title="Equal tokens",
    source="DiLoCo, Table 2 and section 5",
    arms=arms,
    claims=claims,
    figures=figures,
    note="The rates between one batch and eight are not tuned, but follow the root of the batch. "
    "More updates with smaller batches need more time one after the other: what a single cluster can do with the "
    "same tokens.",
)
