"""The run files that we ship (examples/runs), each as an arm beside DiLoCo as tuned at this scale.

Workers, model, batch and inner rate are the scale's, and the shared beginning stands for the warm start; H, fragments,
overlap, codec and the outer step are the file's own.
"""

from typing import Any

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.experiments import t2
from diloco.lab.scales import Scale

TUNED = "DiLoCo as tuned"
OUTER = {"lr": 0.7, "momentum": 0.8, "plain_rounds": 1}
FILES: dict[str, dict[str, Any]] = {
    "cluster": {"num_inner_steps": 15, "codec": "fp16"},
    "regions": {"num_inner_steps": 50, "codec": "int8", "fragments": 4, "overlap_steps": 5},
    "home": {"num_inner_steps": 100, "codec": "int4", "fragments": 4, "overlap_steps": 5},
}
"""The table [sync] of each file; tests/unit/lab compares it with the file."""


def _sync(scale: Scale, name: str) -> dict[str, Any]:
    """Return the file's table, with at most as many fragments as the model has blocks."""
    fragments = min(FILES[name].get("fragments", 1), scale.model["num_layers"])
    return FILES[name] | {"fragments": fragments}


def arms(scale: Scale) -> Arms:
    shipped = {f"{name}.toml": scale.diloco(sync=_sync(scale, name), outer=OUTER) for name in FILES}
    baselines = {t2.ONE: scale.one_worker(), t2.BATCH: scale.data_parallel()}
    return {TUNED: scale.diloco()} | shipped | baselines


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return tuple(
        PublishedClaim(
            f"{name}.toml keeps at least half of the window between one worker and data parallelism",
            "–",
            lambda m, n=name: m.window_kept(f"{n}.toml", t2.ONE, t2.BATCH),  # type: ignore[misc]
            at_least=0.5,
        )
        for name in FILES
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("The shipped run files"),)


EXPERIMENT = Experiment(
    name="run_files",
    title="The shipped run files",
    source="this project, examples/runs",
    arms=arms,
    claims=claims,
    figures=figures,
    note="In the files the warm start is 100 to 400 of 2,000 steps; here it is a third of all steps.",
)
