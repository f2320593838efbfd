"""What a round tells of itself: how alike the outer gradients are, and what the codec has lost."""

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.outer.rounds import RoundEvent
from support.in_turn import InTurn


def rounds_of(workers: int, codec: str) -> list[RoundEvent]:
    world = InTurn(workers, SyncConfig(num_inner_steps=2, codec=codec))  # type: ignore[arg-type]
    told: list[RoundEvent] = []
    world.optimizers[0].loop.on_round = told.append
    world.step(4)
    return told


@pytest.mark.parametrize(("codec", "least", "most"), [("fp16", 1e-6, 1e-3), ("int8", 1e-3, 2e-2), ("int4", 2e-2, 0.3)])
def test_a_round_tells_what_its_codec_has_lost(codec: str, least: float, most: float) -> None:
    for event in rounds_of(2, codec):
        assert event.codec_error is not None and least < event.codec_error < most


def test_a_lossless_codec_has_lost_nothing_and_one_worker_has_no_pair() -> None:
    for event in rounds_of(1, "fp32"):
        assert event.codec_error is None and event.cosines() == [] and event.similarity is None


def test_the_cosines_are_those_of_the_outer_gradients() -> None:
    world = InTurn(3, SyncConfig(num_inner_steps=2, codec="fp32"))
    told: list[RoundEvent] = []
    world.optimizers[2].loop.on_round = told.append
    world.step(1)
    world.inner_step()  # now a round is due
    fragments = [optimizer.loop.state.fragments[0] for optimizer in world.optimizers]
    deltas = [
        (one.anchor - torch.cat([tensor.detach().flatten() for tensor in one.tensors])).double() for one in fragments
    ]
    world.post()
    world.merge()
    expected = [
        (i, j, pytest.approx(float(torch.cosine_similarity(deltas[i], deltas[j], dim=0)), abs=1e-4))
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    assert told[0].cosines() == expected
    assert told[0].similarity == pytest.approx(sum(cosine for _, _, cosine in told[0].cosines()) / 3)
