"""k workers in one process: the reference that every other engine must equal bit for bit, and the laboratory's engine.

The workers may be threads, each with its own loop, or one loop that takes them in turn (`inner_step` and `post` for
all, then `merge` for all). A round is reduced when the last member has posted, in worker order.
Bytes are those that the workers would have sent over a network. `fail_at` drops a worker's contribution on purpose.
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from diloco.codecs.encoded import EncodedVector
from diloco.core.merging import Decision, decide, diverged
from diloco.engines.asynchronous import AnchorLink, AnchorServer, FixedEngine, LocalLink
from diloco.engines.base import PendingRound
from diloco.engines.header import Header, check_same_layout, check_same_round, header_of
from diloco.engines.reduction import reduce_parts, result_of, run_ends
from diloco.engines.rounds import Comparison, Contribution, GlobalState, Member, RoundKey, RoundPhases, RoundResult
from diloco.errors import ConfigError, EngineError, RoundFailed

_START_SECONDS = 60.0
_POLL_SECONDS = 0.002


class LocalSwarm:
    """The meeting place of `workers` local engines."""

    def __init__(self, workers: int, *, fail_at: Collection[tuple[int, int]] = ()) -> None:
        """`fail_at`: pairs (worker, sequence) whose contribution is lost on the way."""
        if workers < 1:
            raise ConfigError(f"workers = {workers} must be at least 1")
        self.workers = workers
        self.fail_at = frozenset(fail_at)
        self.changed = threading.Condition()
        self.rounds: dict[int, _Round] = {}
        self.providers: dict[int, Callable[[], GlobalState]] = {}
        self.anchor_place: list[AnchorServer] = []
        """The place where worker 0 puts the anchor of asynchronous workers."""

    def engines(self) -> list["LocalEngine"]:
        return [LocalEngine(self, worker) for worker in range(self.workers)]


def alone() -> "LocalEngine":
    """Return the engine of a single worker: DiLoCo with k = 1."""
    return LocalSwarm(1).engines()[0]


class LocalEngine(FixedEngine):
    """One worker's end of a LocalSwarm."""

    def __init__(self, swarm: LocalSwarm, worker: int) -> None:
        self.swarm = swarm
        self.worker = worker
        self.workers = swarm.workers
        self._members: tuple[Member, ...] = ()
        self._source: int | None = 0 if worker else None  # whose state to take over at the next fetch
        self._missed: dict[int, int] = {}  # fragment: how many of its rounds the source has merged, or will have

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        with self.swarm.changed:
            round_ = self.swarm.rounds.setdefault(key.sequence, _Round(self.swarm, key.sequence))
            round_.post(self.worker, key, contribution)
            self.swarm.changed.notify_all()
        return _LocalPending(self, round_, key, time.monotonic() + deadline_seconds + contribution.patience_seconds)

    def heard(self, members: tuple[Member, ...]) -> None:
        """Take what a finished round taught this worker of the others."""
        self._members = members

    def missed(self, key: RoundKey, decision: Decision) -> None:
        """Called when the others have a mean of this round, and this worker has not."""
        if decision.contributors:
            self._source = decision.contributors[0]
            self._missed[key.fragment] = self._rounds_of(self.worker, key.fragment) + 1

    def _rounds_of(self, worker: int, fragment: int) -> int:
        provider = self.swarm.providers.get(worker)
        return provider().numbers.get(f"{fragment}.rounds", 0) if provider is not None else 0

    def members(self) -> tuple[Member, ...]:
        return self._members

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        with self.swarm.changed:
            self.swarm.providers[self.worker] = provider
            self.swarm.changed.notify_all()

    def fetch_state(self) -> GlobalState | None:
        """Give worker 0's state at the start; later that of a worker with more merged rounds, or with the right
        anchor."""
        providers = self.swarm.providers
        self._missed = {p: count for p, count in self._missed.items() if self._rounds_of(self.worker, p) < count}
        source = self._source
        if not self._missed:
            self._source = None
        if source is not None:
            state = self._state_of(source)
            check_same_layout(
                {source: state.layout_digest, self.worker: providers[self.worker]().layout_digest}, self.worker
            )
            return state
        states = [provider() for _, provider in sorted(providers.items())]
        ahead = max(states, key=lambda state: state.numbers["merged"])
        mine = providers[self.worker]()
        return ahead if ahead.numbers["merged"] > mine.numbers["merged"] else None

    def _state_of(self, source: int) -> GlobalState:
        """Return the source's state, once it is there and has merged what this worker missed (it may be a slower
        thread)."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if source in self.swarm.providers:
                theirs = self.swarm.providers[source]()  # live tensors: as new as what is compared below
                if not self._members and not self._missed:
                    return _at_its_start(theirs)
                if all(self._rounds_of(source, p) >= count for p, count in self._missed.items()):
                    return theirs
            with self.swarm.changed:
                self.swarm.changed.wait(_POLL_SECONDS)
        raise EngineError(f"worker {source} served no state within {_START_SECONDS} s: build its optimizer first")

    def anchor_link(self, timeout_seconds: float) -> AnchorLink:
        del timeout_seconds
        return LocalLink(self.swarm.anchor_place, self.swarm.changed)

    def close(self) -> None:
        self.closed = True
        self.swarm.providers.pop(self.worker, None)


def _at_its_start(state: GlobalState) -> GlobalState:
    """Return a source's state as it was at its start. A thread may have run ahead, but not its anchors, since the first
    merge needs every worker."""
    return replace(state, numbers={**state.numbers, "inner_steps": 0, "sequence": 0})


class _Round:
    """The contributions of one round, and the result once all are there."""

    def __init__(self, swarm: LocalSwarm, sequence: int) -> None:
        self.swarm = swarm
        self.sequence = sequence
        self.contributions: dict[int, Contribution] = {}
        self.headers: dict[int, Header] = {}
        self.lost = {worker for worker, lost_at in swarm.fail_at if lost_at == sequence}
        self.started = time.monotonic()
        self.posted: dict[int, float] = {}
        self.reduction_began = 0.0
        self.reduction_ended = 0.0
        self.mean: EncodedVector | None = None
        self.decision: Decision | None = None
        self.comparison = Comparison()
        self.error: EngineError | None = None
        self.waits_ended = 0

    def post(self, worker: int, key: RoundKey, contribution: Contribution) -> None:
        if worker in self.headers:
            raise EngineError(f"worker {worker} posted round {key.sequence} twice")
        self.headers[worker] = header_of(worker, key, contribution)
        if worker not in self.lost:
            self.contributions[worker] = contribution
        self.reduction_began = time.monotonic()
        self.posted[worker] = self.reduction_began
        if len(self.headers) == self.swarm.workers:
            self._reduce()
            self.reduction_ended = time.monotonic()

    def withdraw(self, worker: int) -> None:
        """Take back the contribution of a worker that has given up: it will send the same work again."""
        self.lost.add(worker)
        self.contributions.pop(worker, None)

    def end_wait(self) -> None:
        """Count a worker that has waited for the round, or given up: after the last one the contributions go."""
        self.waits_ended += 1
        if self.waits_ended == self.swarm.workers:
            self.swarm.rounds.pop(self.sequence, None)

    def phases(self, worker: int) -> RoundPhases:
        """Return a worker's seconds of each phase. Nothing travels, and the last worker to post reduces for all."""
        last = self.posted[worker] == self.reduction_began
        return RoundPhases(
            others_seconds=self.reduction_began - self.posted[worker],
            reduce_seconds=self.reduction_ended - self.reduction_began if last else None,
        )

    @property
    def complete(self) -> bool:
        return self.decision is not None or self.error is not None

    def _reduce(self) -> None:
        present = sorted(self.contributions)
        if len({(header.key, header.layout_digest) for header in self.headers.values()}) > 1:
            try:
                for worker in present:
                    check_same_round([self.headers[w] for w in sorted(self.headers)], self.headers[worker])
            except EngineError as error:
                self.error = error
                return
        if not present:
            self.decision = Decision((), (), {}, resync=False)
            return
        first = self.contributions[present[0]]
        self.decision = decide(present, [self.headers[w].claim for w in present], first.max_norm_ratio, first.merge)
        vector = first.vector
        has_mean = self.decision.total_weight > 0
        self.mean = EncodedVector(vector.codec.for_means, vector.layout, vector.device)
        if has_mean:
            self.comparison = reduce_parts(
                vector.codec,
                [self.contributions[worker].vector.data for worker in self.decision.contributors],
                self.decision.weights,
                vector.layout.part_elements,
                self.mean.data,
                scales=self.decision.scales,
                merge=self.decision.merge,
            )


class _LocalPending(PendingRound):
    def __init__(self, engine: LocalEngine, round_: _Round, key: RoundKey, deadline: float) -> None:
        self.engine = engine
        self.round = round_
        self.key = key
        self.deadline = deadline

    def wait(self) -> RoundResult:
        round_ = self.round
        swarm = self.engine.swarm
        worker = self.engine.worker
        with swarm.changed:
            if not swarm.changed.wait_for(lambda: round_.complete, self.deadline - time.monotonic()):
                missing = sorted(set(range(swarm.workers)) - round_.headers.keys())
                round_.withdraw(worker)
                round_.end_wait()
                raise RoundFailed(
                    f"round {self.key.sequence}: nothing from workers {missing} before the deadline",
                    silent=tuple(missing),
                )
            round_.end_wait()
        if round_.error is not None:
            raise round_.error
        assert round_.decision is not None
        if worker in round_.lost:
            self.engine.missed(self.key, round_.decision)
            raise self._failure(f"the contribution of worker {worker} was dropped on purpose")
        assert round_.mean is not None
        return self._result(round_.decision, round_.mean)

    def arrived_mean(self) -> EncodedVector | None:
        round_ = self.round
        swarm = self.engine.swarm
        with swarm.changed:
            swarm.changed.wait_for(lambda: round_.complete, self.deadline - time.monotonic())
            return round_.mean if round_.decision is not None and round_.decision.total_weight > 0 else None

    def _failure(self, reason: str, *, resync: bool = True) -> RoundFailed:
        stopping = run_ends(header.member for header in self.round.headers.values())
        return RoundFailed(f"round {self.key.sequence}: {reason}", stopping=stopping, resync=resync)

    def _result(self, decision: Decision, mean: EncodedVector) -> RoundResult:
        worker = self.engine.worker
        members = tuple(
            self.round.headers[w].member for w in range(self.engine.workers)
        )  # a lost contribution's header is heard
        self.engine.heard(members)
        phases = self.round.phases(worker)
        present = [member for member in members if member.worker in self.round.contributions]
        own = [member.worker for member in present].index(worker)
        has_diverged = own in diverged([member.anchor_digest for member in present])
        if has_diverged:
            self.engine.missed(self.key, decision)
        if not decision.contributors and decision.refused:
            raise self._failure(f"every contribution was refused: {decision.refused}", resync=decision.resync)
        return result_of(
            decision,
            self.round.contributions[worker].vector,
            mean,
            members,
            worker,
            resync=has_diverged,
            seconds=time.monotonic() - self.round.started,
            comparison=self.round.comparison,
            phases=phases,
        )
