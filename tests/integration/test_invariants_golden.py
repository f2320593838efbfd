"""Golden trajectories: short runs whose losses and norms may not change by a refactor.

Regenerate with `pytest --regenerate-golden tests/integration/test_invariants_golden.py`, and say in the commit why
they changed. Compared with a tolerance, since kernels differ between processors; an error in the method is far larger.
"""

import json
from pathlib import Path

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import Adam, Nesterov
from support.in_turn import InTurn
from support.problem import anchors, loss_of

GOLDEN = Path(__file__).parent.parent / "golden"
RUNS = {
    "nesterov_fp16": (3, SyncConfig(5), Nesterov()),
    "streaming_int8": (2, SyncConfig(6, "int8", fragments=2, overlap_steps=3, mixing=0.5), Nesterov(lr=0.4)),
    "adam_fp32": (2, SyncConfig(4, "fp32"), Adam()),
    "alone_every_step": (1, SyncConfig(1), Nesterov(lr=0.3, momentum=0.5)),  # gentle: with 0.7 and 0.9 it is chaotic
}


def trajectory(name: str) -> dict[str, list[float]]:
    """Every third step: the outer parameters' loss on a fixed batch, the anchors' norm, the last worker's loss."""
    workers, sync, outer = RUNS[name]
    world = InTurn(workers, sync, outer)
    model, optimizer = world.models[-1], world.optimizers[-1]
    seen: dict[str, list[float]] = {"outer_loss": [], "anchor_norm": [], "worker_loss": []}
    for _ in range(8):
        world.step(3)
        with torch.no_grad():
            seen["worker_loss"].append(loss_of(model, 99, 0).item())
            with optimizer.outer_parameters():
                seen["outer_loss"].append(loss_of(model, 99, 0).item())
            seen["anchor_norm"].append(float(torch.linalg.vector_norm(anchors(optimizer).double())))
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_the_trajectory_is_the_golden_one(name: str, regenerate_golden: bool) -> None:
    path = GOLDEN / f"{name}.json"
    seen = trajectory(name)
    if regenerate_golden:
        path.write_text(json.dumps(seen, indent=1) + "\n")
    golden = json.loads(path.read_text())
    assert seen.keys() == golden.keys()
    for key, values in golden.items():
        assert seen[key] == pytest.approx(values, rel=1e-4), key


def test_the_golden_runs_are_far_apart_from_each_other() -> None:
    """So that the tolerance cannot hide one method behind another."""
    norms = [json.loads((GOLDEN / f"{name}.json").read_text())["anchor_norm"][-1] for name in RUNS]
    assert all(abs(a - b) > 1e-3 * a for i, a in enumerate(norms) for b in norms[i + 1 :])
