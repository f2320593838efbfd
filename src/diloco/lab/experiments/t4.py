"""Table 4 of the DiLoCo paper: what DiLoCo gains over one worker, by the size of the model."""

from typing import Any

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

SIZES = {"small": 0.5, "medium": 1.0, "large": 1.5}
"""Factors of the width; the paper's models have 60M, 150M and 400M parameters."""


def _model(scale: Scale, factor: float) -> dict[str, Any]:
    """Width, heads and feed-forward width times `factor`; the dimension of a head stays."""
    heads = max(2, int(scale.model["num_heads"] * factor))
    kv_heads = max(1, int(scale.model["num_kv_heads"] * factor))
    while heads % kv_heads:
        kv_heads -= 1
    return dict(scale.model) | {
        "hidden_size": heads * scale.model["head_dim"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": int(scale.model["intermediate_size"] * factor),
    }


def arms(scale: Scale) -> Arms:
    arms_by_name = {}
    for size, factor in SIZES.items():
        changes: dict[str, Any] = {} if factor == 1.0 else {"model": _model(scale, factor)}
        arms_by_name[f"{size}, DiLoCo"] = scale.diloco(**changes)
        arms_by_name[f"{size}, one worker"] = scale.one_worker(**changes)
    return arms_by_name


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    published = {"small": "4.33 % (60M)", "medium": "7.45 % (150M)", "large": "7.49 % (400M)"}
    expected = {"small": 0.0433, "medium": 0.0745, "large": 0.0749}
    gains = tuple(
        PublishedClaim(
            f"DiLoCo gains over one worker with the {size} model",
            published[size],
            lambda m, s=size: -m.change(f"{s}, DiLoCo", f"{s}, one worker"),  # type: ignore[misc]
            at_least=0.0,
            expected=expected[size],
        )
        for size in SIZES
    )
    growing = PublishedClaim(
        "The gain with the large model is above that with the small one",
        "+3.16 %",
        lambda m: m.change("small, DiLoCo", "small, one worker") - m.change("large, DiLoCo", "large, one worker"),
        at_least=0.0,
        expected=0.0316,
    )
    return (*gains, growing)


def figures(scale: Scale) -> tuple[Figure, ...]:
    sizes = {
        size: scale.diloco(model=_model(scale, factor)).model_config(scale.vocab_size).num_parameters() / 1e6
        for size, factor in SIZES.items()
    }
    lines = {side: {f"{size}, {side}": millions for size, millions in sizes.items()} for side in _SIDES}
    return (Sweep("Table 4: the size of the model", "million parameters", lines, x_log=True, relative=False),)


_SIDES = ("DiLoCo", "one worker")
EXPERIMENT = Experiment(
    name="t4",
    title="The size of the model",
    source="DiLoCo, Table 4",
    arms=arms,
    claims=claims,
    figures=figures,
    note="As in the paper, the rates were tuned for the medium model only.",
)
