"""Who reduces which parts: a fragment's parts go through the network in waves, each worker reducing a run of each wave.

Parts and their owners decide only who does the work and how many bytes travel, never a bit of the mean: a part is
encoded by itself, and its mean is accumulated in worker order whoever does it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from diloco.codecs.encoded import EncodedVector

_WAVE_BYTES_PER_WORKER = (
    1 << 21
)  # what a worker reduces at a time: large enough for the link, small enough for the cache


@dataclass(frozen=True)
class Wave:
    """Consecutive parts from `first`; worker j reduces `counts[j]` of them, in order."""

    first: int
    counts: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return sum(self.counts)

    def start_of(self, worker: int) -> int:
        return self.first + sum(self.counts[:worker])


def waves(vector: EncodedVector, workers: int) -> Iterator[Wave]:
    """All parts of a vector, in waves shared out as evenly as whole parts allow."""
    num_parts, part_bytes = vector.data.shape
    per_worker = max(1, _WAVE_BYTES_PER_WORKER // part_bytes)
    for first in range(0, num_parts, per_worker * workers):
        count = min(per_worker * workers, num_parts - first)
        yield Wave(first, tuple(count // workers + (j < count % workers) for j in range(workers)))


def traffic(vector: EncodedVector, workers: int, worker: int) -> tuple[int, int]:
    """Bytes that a worker sends and receives for one mean: a reduce-scatter and an all-gather of encoded parts."""
    own = sum(wave.counts[worker] for wave in waves(vector, workers))
    num_parts, part_bytes = vector.data.shape
    crossing = (num_parts - own) + own * (workers - 1)
    return crossing * part_bytes, crossing * part_bytes
