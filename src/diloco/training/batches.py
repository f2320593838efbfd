"""The batch of each inner step, from the shards of one worker.

Batches are a function of the seed, the shards and how far each had been read when this worker took it over, so a count
of batches is all that must be saved. When the number of workers changes, the shards are shared out again, and each
continues where its last reader had stopped: nothing is read twice in an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diloco.data.corpus import Corpus
from diloco.data.order import Int64, Progress, ShardProgress, WorkerBatches
from diloco.training.config.run import RunConfig


@dataclass(frozen=True)
class WorkerTexts:
    """The text of a run, and the part of it that is on this machine."""

    shared: Corpus
    """Shared out among the workers; all validate on it, and its tokenizer is the run's."""
    own: Corpus | None = None
    """In a swarm a worker may read text of its own instead."""
    own_index: int = 0
    own_readers: int = 1
    """The local workers of this machine share its own text: this one's index, and how many there are."""

    @property
    def read(self) -> Corpus:
        """The text that this machine's workers train on."""
        return self.own or self.shared


class ShardReader:
    """Reads one worker's shards, batch by batch."""

    def __init__(self, corpus: Corpus, config: RunConfig, shards: Sequence[int]) -> None:
        self._corpus = corpus
        self._config = config
        self.shards = list(shards)
        self.masked = corpus.meta.masked
        """Whether the corpus has a loss mask: a token t that is not learnt is −1 − t."""
        self.step = 0
        """Number of the next batch; batches that earlier readers had read of these shards count."""
        self.take(None, since=0)

    def take(
        self, progress: Progress | None, since: int | None = None, shards: Sequence[int] | None = None
    ) -> list[int]:
        """Read the shards from batch `since` on (default: the next one): from where `progress` says, or from their
        beginning if it is None. `shards`: read these from now on.

        Returns the shards that are missing in `progress`: they too are read from their beginning.
        """
        if shards is not None:
            self.shards = list(shards)
        since = self.step if since is None else since
        unknown = [] if progress is None else [shard for shard in self.shards if shard not in progress]
        if progress is not None:
            progress = {shard: progress.get(shard, ShardProgress()) for shard in self.shards}
        config = self._config
        length = self._config.data.sequence_length
        batch = config.training.batch_size
        self._batches = WorkerBatches(self._corpus, length, batch, self.shards, config.seed, progress)
        self._since = since
        self._before = progress
        self.step = since
        return unknown

    def next(self) -> Int64:
        """Return the [batch_size, sequence_length + 1] tokens of the next inner step."""
        batch = self._batches.batch(self.step - self._since)
        self.step += 1
        return batch

    def progress(self) -> dict[int, ShardProgress]:
        """Return how far every shard has been read."""
        return self._batches.progress(self.step - self._since)

    @property
    def weight(self) -> float:
        """Training tokens in these shards."""
        return self._corpus.worker_weight(self.shards)

    def state_dict(self) -> dict[str, Any]:
        before = None if self._before is None else as_json(self._before)
        return {"step": self.step, "since": self._since, "before": before, "progress": as_json(self.progress())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the saved positions, unless the shards have changed with the number of workers: `take` then sets
        the positions."""
        if {int(shard) for shard in state["progress"]} != set(self.shards):
            return
        saved = state["before"]
        before = None if saved is None else {int(shard): ShardProgress(*read) for shard, read in saved.items()}
        self.take(before, state["since"])
        self.step = state["step"]


def as_json(progress: Progress) -> dict[str, list[int]]:
    return {str(shard): list(read) for shard, read in progress.items()}
