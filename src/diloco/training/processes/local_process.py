"""What a launcher and its worker processes both know: a worker's place, its files, what stops it. Torch-free."""

import signal
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

RENDEZVOUS_FILE = ".rendezvous"
"""In the run folder, where the processes of a start meet; the ranks of a swarm's worker have one with its name."""
NO_CUDA = "device = cuda, but this machine has no CUDA device that torch can use: use --device cpu"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ending_signals() -> list[signal.Signals]:
    """Return the stop signals that end a run: all, but SIGHUP where it is ignored (nohup)."""
    return [
        number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


@dataclass(frozen=True)
class LocalRank:
    """A process of a run with a fixed set of workers: a whole worker, or one of a worker's ranks."""

    process: int
    ranks_of_workers: tuple[int, ...]
    """The ranks of each worker; consecutive processes are one worker."""
    run_folder: Path
    corpus_folder: Path
    parent: int
    """Process id of the launcher: a worker does not outlive it."""
    resume: bool = False
    """Continue from the run folder's checkpoints."""

    @property
    def processes(self) -> int:
        return sum(self.ranks_of_workers)

    @property
    def worker(self) -> int:
        return sum(first <= self.process for first in accumulate(self.ranks_of_workers))

    @property
    def rank(self) -> int:
        """The rank within the worker."""
        return self.process - sum(self.ranks_of_workers[: self.worker])

    def __str__(self) -> str:
        worker = f"worker {self.worker}"
        return worker if self.ranks_of_workers[self.worker] == 1 else f"{worker}, rank {self.rank},"

    @property
    def log(self) -> Path:
        """The file of everything that the process and its libraries write."""
        rank = "" if self.ranks_of_workers[self.worker] == 1 else f"-rank-{self.rank}"
        return self.run_folder / "logs" / f"worker-{self.worker}{rank}.log"


@dataclass(frozen=True)
class SwarmSlot:
    """A process of a swarm's local worker, or of one of its ranks. The worker gets its number when it joins."""

    index: int
    ranks_of_workers: tuple[int, ...]
    """The ranks of each local worker of this machine."""
    run_folder: Path
    corpus_folder: Path
    own_folder: Path | None
    """Text of its own, if it does not read the swarm's."""
    parent: int
    """Process id of the launcher."""
    founder: bool
    """Starts the swarm, or starts it again from a checkpoint, if no other member answers."""
    rank: int = 0

    @property
    def ranks(self) -> int:
        return self.ranks_of_workers[self.index]

    @property
    def processes(self) -> int:
        """All processes of this machine's local workers."""
        return sum(self.ranks_of_workers)

    @property
    def process(self) -> int:
        """Its place among them."""
        return sum(self.ranks_of_workers[: self.index]) + self.rank

    @property
    def rendezvous(self) -> Path:
        return self.run_folder / f"{RENDEZVOUS_FILE}-{self.name}"

    @property
    def name(self) -> str:
        """The name of the worker's files in RUN/swarm."""
        return worker_name(self.index)

    def __str__(self) -> str:
        return f"local worker {self.index}" if self.ranks == 1 else f"rank {self.rank} of local worker {self.index}"

    @property
    def log(self) -> Path:
        rank = "" if self.ranks == 1 else f"-rank-{self.rank}"
        return self.run_folder / "logs" / f"{self.name}{rank}.log"


def worker_name(index: int) -> str:
    """Return the name of a swarm's local worker, which its files have."""
    return f"worker-{index}"
