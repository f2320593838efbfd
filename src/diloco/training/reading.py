"""What a worker reads: the batch of each inner step, from its own shards, wherever earlier workers had come in them.

Batches are a function of the seed, the shards and how far each had been read when this worker took them over; so a
position is all that must be saved. With another number of workers the shards are shared out anew, and each goes on
where its last reader had stopped: nothing is read twice in an epoch.
"""

from typing import Any

from diloco.data.corpus import Corpus
from diloco.data.order import Int64, Progress, ShardProgress, WorkerBatches, check_disjoint, worker_shards
from diloco.training.config import RunConfig


class Reading:
    """One worker's share of the text."""

    def __init__(self, corpus: Corpus, config: RunConfig, worker: int, workers: int) -> None:
        check_disjoint(corpus, workers)
        self._corpus, self._config = corpus, config
        self.shards = worker_shards(corpus.shards, worker, workers)
        self.step = 0
        """Inner steps whose batches have been read."""
        self.take(None, since=0)

    def take(self, progress: Progress | None, since: int) -> list[int]:
        """The shards as far as they had been read before inner step `since`; None: from their beginning.

        Returns the shards that `progress` knows nothing of: they too are read from their beginning.
        """
        unknown = [] if progress is None else [shard for shard in self.shards if shard not in progress]
        if progress is not None:
            progress = {shard: progress.get(shard, ShardProgress()) for shard in self.shards}
        config, length = self._config, self._config.data.sequence_length
        batch = config.training.batch_size
        self._batches = WorkerBatches(self._corpus, length, batch, self.shards, config.seed, progress)
        self._since, self._before, self.step = since, progress, since
        return unknown

    def batch(self, step: int) -> Int64:
        """[batch_size, sequence_length + 1] tokens for the inner step that follows `step` earlier ones."""
        self.step = step + 1
        return self._batches.batch(step - self._since)

    def progress(self) -> dict[int, ShardProgress]:
        """How far every shard has been read."""
        return self._batches.progress(self.step - self._since)

    @property
    def weight(self) -> float:
        """Training tokens in these shards."""
        return self._corpus.worker_weight(self.shards)

    def state_dict(self) -> dict[str, Any]:
        before = None if self._before is None else _as_json(self._before)
        return {"step": self.step, "since": self._since, "before": before, "progress": _as_json(self.progress())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not if the number of workers has changed: `take` then says where the shards go on."""
        if {int(shard) for shard in state["progress"]} != set(self.shards):
            return
        before = state["before"]
        before = before and {int(shard): ShardProgress(*read) for shard, read in before.items()}
        self.take(before, state["since"])
        self.step = state["step"]


def _as_json(progress: Progress) -> dict[str, list[int]]:
    return {str(shard): list(read) for shard, read in progress.items()}
