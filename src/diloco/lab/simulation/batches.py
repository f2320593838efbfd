"""The tokens that replicas train and are evaluated on, on the device where they are computed.

Each worker draws its windows at random places of its text, from a generator of its own: worker 3's batches are the same
whatever the number of workers. The places for all steps are drawn at once and lie on the device, so that a step needs
nothing from the host.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.corpus import Corpus
from diloco.errors import DataError
from diloco.lab.arm import Arm

Ranges = list[tuple[int, int]]
"""[start, stop) in the tokens of all shards, one after another."""
PRETRAINING = 1 << 20
"""The number of the worker whose batches the shared pre-training has."""


class CorpusTokens:
    """All shards of a corpus as one tensor [tokens], and windows of its validation text [rows, T + 1]."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        if corpus.meta.masked:
            raise DataError("the corpus has a loss mask, which the laboratory does not compute: prepare plain text")
        self.device = device
        self.tokens = _tokens(str(corpus.folder), corpus.digest, str(device))
        ends = np.cumsum(corpus.meta.shard_tokens).tolist()
        self.shards: Ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        self._validation = corpus.validation()

    def ranges(self, arm: Arm, worker: int) -> Ranges:
        """Return the ranges that a worker reads: everything, or its own shards. With more workers than shards some
        share one."""
        if arm.data == "iid" or worker == PRETRAINING:
            return [(0, self.shards[-1][1])]
        count = len(self.shards)
        return self.shards[worker :: arm.workers] if arm.workers <= count else [self.shards[worker % count]]

    def weight(self, arm: Arm, worker: int) -> float:
        """Return the weight of a worker's contributions: 1, or the tokens that it reads."""
        return 1.0 if arm.data == "iid" else float(sum(stop - start for start, stop in self.ranges(arm, worker)))

    def windows(self, ranges: Ranges, steps: int, size: int, length: int, seed: Sequence[int]) -> NDArray[np.int64]:
        """Draw the first tokens of windows of length + 1 tokens: [steps, size]."""
        usable = [(start, stop - length - 1) for start, stop in ranges if stop - start > length + 1]
        if not usable:
            raise DataError(f"no shard of this worker has more than {length + 1} tokens: prepare more text")
        starts = np.array([start for start, _ in usable])
        ends = np.cumsum([stop - start for start, stop in usable])
        places = np.random.default_rng(list(seed)).integers(0, ends[-1], (steps, size))
        shard = np.searchsorted(ends, places, side="right")
        first_tokens: NDArray[np.int64] = places - np.concatenate([[0], ends[:-1]])[shard] + starts[shard]
        return first_tokens

    def batch(self, places: Tensor, length: int) -> Tensor:
        """Return the windows whose first tokens are at `places`: int64 […, length + 1]."""
        return self.tokens[places[..., None] + torch.arange(length + 1, device=self.device)].long()

    def validation(self, windows: int, length: int) -> Tensor:
        """Return validation windows at even distances: [rows, length + 1]."""
        rows = min(windows, (len(self._validation) - 1) // length)
        if rows < 1:
            raise DataError(f"the validation text has {len(self._validation)} tokens, a window {length + 1}")
        distance = (len(self._validation) - 1 - length) // max(1, rows - 1) if rows > 1 else 0
        positions = np.arange(rows)[:, None] * distance + np.arange(length + 1)
        return torch.from_numpy(self._validation[positions].astype(np.int64)).to(self.device)


@lru_cache(maxsize=2)
def _tokens(folder: str, digest: str, device: str) -> Tensor:
    """Load the corpus's tokens to the device, once for all arms of a process."""
    del digest  # part of the key: a folder that was prepared anew is read anew
    corpus = Corpus.open(Path(folder))
    shards = [np.asarray(corpus.shard(index)).astype(np.int32) for index in range(corpus.shards)]
    return torch.from_numpy(np.concatenate(shards)).to(device)
