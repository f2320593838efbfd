"""The starts of eager updates (core/methods/eager.py), when a round fails or another anchor replaces the worker's."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from diloco.core.methods.eager import Eager
from diloco.outer.replica import Lane


def eagers(lanes: Sequence[Lane], index: int) -> list[Eager]:
    """What this rank has of one fragment, by lane; nothing without eager updates."""
    found = [lane.sending[index].eager for lane in lanes]
    return [eager for eager in found if eager is not None]


def take_back(lanes: Sequence[Lane], index: int, turn: int) -> bool:
    """A round in flight has failed: its work is this worker's own again. False: the worker has moved on without it."""
    back = [eager.take_back(lane.engine.workers, turn) for lane in lanes for eager in eagers([lane], index)]
    return all(back)


@contextmanager
def moving_starts(lanes: Sequence[Lane], indices: Iterable[int]) -> Iterator[None]:
    """Inside, the others' anchors of these fragments come in place of this worker's: its starts move along."""
    moving = [eager for index in indices for eager in eagers(lanes, index)]
    for eager in moving:
        eager.add_anchor(-1.0)
    yield
    for eager in moving:
        eager.add_anchor(1.0)
