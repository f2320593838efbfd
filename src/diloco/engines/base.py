"""The engine contract: which workers average, and how. Everything that can fail, wait or travel is behind it.

A `Connection` joins this process to the other workers; it gives an `Engine` for each lane that the process is in. A
worker of one rank is in one lane, and its engine is its connection too. `with connection:` closes it on every way out.
Nothing that arrives is unpickled.

- `start_round` returns at once; the transfer runs beside training. `PendingRound.wait` is bounded by the deadline.
- The divisor is the total weight of the contributions that are really in the mean, never the expected world size.
- Every worker gets the same bits: one worker accumulates a part in fp32 in worker order and encodes its mean once, and
  all decode those bytes. On the CPU every engine gives the same trajectory as `local`, bit for bit.
- A failed round changes no anchor and loses no local work: the next outer gradient carries it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from diloco.codecs.encoded import EncodedVector
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult
from diloco.engines.worker_ranks import ALONE, WorkerRanks


class PendingRound(ABC):
    @abstractmethod
    def wait(self) -> RoundResult:
        """Return the result; raises RoundFailed if this round gave none, EngineError if no later one can."""

    def arrived_mean(self) -> EncodedVector | None:
        """Wait for the mean in another thread, before `wait`, which ends the round; None: `wait` says what happened.

        An engine that leaves it out is as good, but the outer step is then computed in the trainer's thread.
        """
        return None


class Connection(ABC):
    """A process's connection to the other workers. It is one of the `ranks` of worker `worker`, which is a number from
    0 to `workers` − 1."""

    worker: int
    workers: int
    sizes: tuple[int, ...]
    """The number of ranks of each worker; always (1,) with an elastic engine."""
    ranks: WorkerRanks
    elastic: ClassVar[bool] = False
    """Workers come and go while the others train: `worker` is a number that no other worker has, `workers` how many
    there are at the moment. A worker that stops leaves alone; one that missed a round calls `fetch_state`."""
    excluded: str | None = None
    """Why the others have excluded this worker for good, if they have: no later round can succeed."""
    closed: bool = False

    @property
    def mean_is_own(self) -> bool:
        """Whether every mean is this worker's own contribution, since no other worker can ever take part."""
        return len(self.sizes) == 1 and not self.elastic

    def wanted(self, sequence: int) -> bool:
        """Whether the others are in this round, or past it, and wait no longer: it is posted now, with the work there
        is.

        Elastic workers ask it after every inner step, all ranks of a worker together. A round that is over fails at
        once when it is posted.
        """
        del sequence
        return False

    def progress(  # noqa: B027 - only a swarm has a status
        self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float, run_tokens: int = 0
    ) -> None:
        """Tell the others how far this worker is, for `diloco status`; an engine without a status does nothing.

        Called by elastic workers after every inner step. `run_tokens`: in all means of the run, if that is counted.
        """

    @abstractmethod
    def lanes(self, owners: Sequence[tuple[int, ...]]) -> "list[Engine | None]":
        """Return an engine for each lane; None where this process is not in it. Collective.

        `owners`, the same list on all processes: for every lane, the rank of each worker that is in it."""

    @abstractmethod
    def members(self) -> tuple[Member, ...]:
        """Return the workers as last heard of, this one included."""

    @abstractmethod
    def close(self) -> None:
        """Leave the others; never waits for a peer. Then `closed`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Engine(Connection):
    """One lane's averaging, and for a worker of one rank all of it."""

    ranks = ALONE

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1,) * (1 if self.elastic else self.workers)

    most_state_bytes: int | None = None
    """Set by the outer loop of elastic workers: a state that takes more bytes is not of this run."""
    next_round: Callable[[], int | None] | None = None
    """Set by the outer loop of elastic workers: gives the first round that is not in this worker's state, in any thread
    and without waiting for the trainer; None: its state is of no use."""

    def lanes(self, owners: Sequence[tuple[int, ...]]) -> "list[Engine | None]":
        assert list(owners) == [(0,) * len(self.sizes)]
        return [self]

    @abstractmethod
    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        """Begin averaging `contribution` with the others' of the same key; returns at once."""

    @abstractmethod
    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        """Let others fetch the global state as this worker has it; `provider` gives it.

        The latest one counts: an engine serves one optimizer at a time; two at once need an engine each. An elastic
        engine may call it in a thread of its own at any time and gets copies on the CPU, or RoundFailed (not now).
        """

    @abstractmethod
    def fetch_state(self) -> GlobalState | None:
        """Return the global state if this worker must take it over, None if it holds it already.

        An elastic engine gives the state after all rounds that the others have ended; it may be older than this
        worker's, if that went on alone. RoundFailed if there is none now: it is asked again at the next post.
        """
