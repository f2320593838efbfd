"""Who reduces which parts: a fragment's parts go through the network in waves, each worker reducing a run of each wave.

Parts and their owners decide only who does the work and how many bytes travel, never a bit of the mean: a part is
encoded by itself, and its mean is accumulated in worker order whoever does it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector

_WAVES_WANTED = 32  # few enough that a link's latency does not add up, enough that a wave is small beside the model
_MIN_WAVE_BYTES_PER_WORKER = 1 << 18


@dataclass(frozen=True)
class Wave:
    """Consecutive parts from `first`; worker j reduces `counts[j]` of them, in order."""

    first: int
    counts: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return sum(self.counts)

    def split(self, data: Tensor) -> list[Tensor]:
        """What each worker reduces, as views of all parts."""
        return list(torch.split_with_sizes(data[self.first : self.first + self.num_parts], self.counts))


def waves(vector: EncodedVector, workers: int) -> Iterator[Wave]:
    """All parts of a vector, in waves shared out as evenly as whole parts allow."""
    num_parts, part_bytes = vector.data.shape
    per_worker = max(-(-num_parts // (_WAVES_WANTED * workers)), _MIN_WAVE_BYTES_PER_WORKER // part_bytes, 1)
    for first in range(0, num_parts, per_worker * workers):
        count = min(per_worker * workers, num_parts - first)
        yield Wave(first, tuple(count // workers + (j < count % workers) for j in range(workers)))


def traffic(vector: EncodedVector, workers: int, worker: int) -> tuple[int, int]:
    """Bytes that a worker sends and receives for one mean: a reduce-scatter and an all-gather of encoded parts."""
    own = sum(wave.counts[worker] for wave in waves(vector, workers))
    num_parts, part_bytes = vector.data.shape
    crossing = (num_parts - own) + own * (workers - 1)
    return crossing * part_bytes, crossing * part_bytes
