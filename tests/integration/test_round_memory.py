"""What a round travels in is there while it travels, and not beside the inner steps."""

import pytest

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import SyncConfig
from support.in_turn import InTurn

H = 2


def has_memory(vector: EncodedVector) -> bool:
    return vector._data is not None


@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(H, "fp16"),
        SyncConfig(H, "topk"),  # a mean has memory of its own
        SyncConfig(H, "fp32", second_moment_every=1),
        SyncConfig(2 * H, "int8", fragments=2, overlap_steps=1),
    ],
    ids=lambda sync: sync.codec,
)
def test_memory_of_a_round_is_given_back_when_it_is_merged(sync: SyncConfig) -> None:
    world = InTurn(2, sync)
    vectors = [one.vector for o in world.optimizers for lane in o.loop.replica.lanes for one in lane.sending]
    assert not any(has_memory(vector) for vector in vectors)
    world.step(sync.num_inner_steps - 1)
    world.inner_step()
    world.post()
    for optimizer in world.optimizers:
        optimizer.loop.replica.finish_posts()
    assert any(has_memory(vector) for vector in vectors)
    world.merge()
    for optimizer in world.optimizers:
        optimizer.loop.merge_pending()
        optimizer.loop.replica.finish_posts()
    assert not any(has_memory(vector) or has_memory(vector.mean) for vector in vectors)
    assert len(set(world.digests())) == 1
