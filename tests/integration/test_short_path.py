"""One outer step is short to read: how many source files it runs through, and how often it changes from one to another.

Counted over the calls of Python functions in the package (`sys.setprofile`).
"""

import gc
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import diloco
from diloco.core.config import SyncConfig
from support.in_turn import InTurn

PACKAGE = str(Path(diloco.__file__).parent)
MOST_FILES, MOST_CHANGES = 15, 70


class Trace:
    """The files of the package in the order of the calls into them."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.append(frame.f_code.co_filename)

    @property
    def changes(self) -> int:
        return sum(here != before for before, here in zip([None, *self.files], self.files, strict=False))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_outer_step_of_a_one_rank_worker_runs_through_few_files(workers: int) -> None:
    world = InTurn(workers, SyncConfig(num_inner_steps=2, codec="fp16"))
    world.step(3)  # the first round is over, and whatever is computed once is there
    model, optimizer = world.models[0], world.optimizers[0]
    for other in world.optimizers[1:]:
        other.inner_step()
        other.post()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gc.collect()  # what earlier tests left behind is not part of this step
    trace = Trace()
    sys.setprofile(trace)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert optimizer.loop.rounds == 2
    assert len(set(trace.files)) <= MOST_FILES, sorted(set(trace.files))
    assert trace.changes <= MOST_CHANGES
