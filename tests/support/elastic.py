"""Workers that come and go, in one process and by script: an elastic engine without a network.

A round ends when all live workers have posted it, or without those that the script leaves out. Means are kept, so that
a worker that was away can make up for it. Nothing here waits for a slow worker on its own: the
test says which worker is called when.
"""

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import SyncConfig
from diloco.core.merging import Decision, decide, diverged
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.engines.base import Engine, PendingRound
from diloco.engines.header import HEADER_BYTES, Header, check_same_round, pack, unpack
from diloco.engines.reduction import reduce_parts
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult
from diloco.errors import RoundFailed
from diloco.optimizer import DiLoCo
from support.problem import Net, build, loss_of


class ElasticSwarm:
    """The meeting place. `drop`: pairs (worker, sequence) whose contribution is lost on the way."""

    def __init__(self, live: Collection[int] = (0,), *, drop: Collection[tuple[int, int]] = ()) -> None:
        self.live = set(live)
        self.drop = frozenset(drop)
        self.changed = threading.Condition()
        self.rounds: dict[int, Round] = {}
        self.providers: dict[int, Callable[[], GlobalState]] = {}
        self.called = -1
        self.frozen: GlobalState | None = None
        self.unavailable = 0
        """So many fetches find no other worker."""
        self.states_sent = 0
        self.means_only = False
        """A worker with a sound state of its own gets the means of the rounds since, and nothing else."""

    def engine(self, worker: int) -> "ElasticEngine":
        with self.changed:
            self.live.add(worker)
        return ElasticEngine(self, worker)

    def call(self, sequence: int) -> None:
        self.called = max(self.called, sequence)

    def leave_out(self, worker: int, sequence: int) -> None:
        with self.changed:
            self.round(sequence).left_out.add(worker)
            self.end_rounds()

    def leave(self, worker: int) -> None:
        with self.changed:
            self.live.discard(worker)
            self.providers.pop(worker, None)
            self.end_rounds()

    def freeze(self, source: int) -> None:
        """What the source holds now is what the next fetch gets, with the means of whatever ends until then."""
        self.frozen = self.providers[source]()

    def round(self, sequence: int) -> "Round":
        return self.rounds.setdefault(sequence, Round(sequence))

    def end_rounds(self) -> None:
        for round_ in self.rounds.values():
            round_.end_if_complete(self)
        self.changed.notify_all()

    def state_for(self, worker: int) -> GlobalState | None:
        """Waits until some other worker has a state to give."""
        if self.means_only:
            with suppress(RoundFailed):
                mine = self.providers[worker]()
                return self._since(replace(mine, tensors={}, numbers={"sequence": mine.numbers["sequence"]}))
        deadline = time.monotonic() + 100.0
        while self.frozen is None:
            if not self.providers.keys() - {worker}:
                return None  # the worker that had more is gone
            for source in sorted(self.providers.keys() - {worker}):
                try:
                    return self._since(self.providers[source]())
                except RoundFailed:
                    continue
            assert time.monotonic() < deadline, "no worker has a state"
            time.sleep(0.002)
        frozen, self.frozen = self.frozen, None
        return self._since(frozen)

    def _since(self, state: GlobalState) -> GlobalState:
        self.states_sent += bool(state.tensors)
        sequence, means, position = state.numbers["sequence"], [], 0
        ended = [(sequence, round_.decision) for sequence, round_ in self.rounds.items()]
        plain = frozenset(sequence for sequence, decision in ended if decision is not None and decision.plain)
        while sequence in self.rounds and self.rounds[sequence].decision is not None:
            round_ = self.rounds[sequence]
            if round_.mean is not None:
                means.append((round_.key, round_.mean.clone()))
            sequence += 1
        for provider in list(self.providers.values()):
            with suppress(RoundFailed):
                position = max(position, provider().numbers["inner_steps"])
        numbers = {**state.numbers, "sequence": sequence}
        return replace(state, numbers=numbers, means=tuple(means), plain=plain, position=position)


class Round:
    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.left_out: set[int] = set()
        """Also those whose contribution was lost on the way."""
        self.posted: dict[int, Contribution] = {}
        self.headers: dict[int, Header] = {}
        self.decision: Decision | None = None
        self.mean: torch.Tensor | None = None
        self.roster: tuple[int, ...] = ()

    @property
    def key(self) -> RoundKey:
        return next(iter(self.headers.values())).key

    def end_if_complete(self, swarm: ElasticSwarm) -> None:
        waiting = swarm.live - self.left_out - self.headers.keys()
        if waiting or not self.headers or self.decision is not None:
            return
        self.left_out |= {worker for worker, sequence in swarm.drop if sequence == self.sequence}
        present = sorted(self.posted.keys() - self.left_out)
        self.roster = tuple(sorted(swarm.live))
        if not present:
            self.decision = Decision((), (), {}, resync=False)
            return
        for worker in present:
            check_same_round([self.headers[w] for w in present], self.headers[worker])
        first = self.posted[present[0]]
        self.decision = decide(present, [self.headers[w].claim for w in present], first.max_norm_ratio, first.merge)
        if self.decision.total_weight > 0:
            self.mean = torch.empty_like(first.vector.mean.data)
            encoded = [self.posted[w].vector.data for w in self.decision.contributors]
            part, scales, merge = first.vector.layout.part_elements, self.decision.scales, self.decision.merge
            weights, mean = self.decision.weights, self.mean
            reduce_parts(first.vector.codec, encoded, weights, part, mean, scales=scales, merge=merge)


class ElasticEngine(Engine):
    elastic = True

    def __init__(self, swarm: ElasticSwarm, worker: int) -> None:
        self.swarm, self.worker = swarm, worker
        self.must_fetch = worker != 0
        self._members: tuple[Member, ...] = ()

    @property
    def workers(self) -> int:  # type: ignore[override]
        return len(self.swarm.live)

    def wanted(self, sequence: int) -> bool:
        return sequence <= self.swarm.called

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        kept = EncodedVector(contribution.vector.codec, contribution.vector.layout)
        kept.data.copy_(contribution.vector.data)
        with self.swarm.changed:
            round_ = self.swarm.round(key.sequence)
            if round_.decision is None:
                header = unpack(self.worker, pack(key, contribution))
                header = replace(header, member=replace(header.member, note=contribution.note))
                round_.posted[self.worker] = replace(contribution, vector=kept)
                round_.headers[self.worker] = header
                self.swarm.end_rounds()
        return _Pending(self, round_, key, kept, time.monotonic() + deadline_seconds)

    def members(self) -> tuple[Member, ...]:
        return self._members

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self.swarm.providers[self.worker] = provider

    def fetch_state(self) -> GlobalState | None:
        if not self.must_fetch:
            return None
        if self.swarm.unavailable:
            self.swarm.unavailable -= 1
            raise RoundFailed("nobody answers")
        state = self.swarm.state_for(self.worker)
        self.must_fetch = False
        return state

    def close(self) -> None:
        self.swarm.leave(self.worker)


class _Pending(PendingRound):
    def __init__(
        self, engine: ElasticEngine, round_: Round, key: RoundKey, vector: EncodedVector, deadline: float
    ) -> None:
        self.engine, self.round, self.key, self.vector, self.deadline = engine, round_, key, vector, deadline

    def wait(self) -> RoundResult:
        engine, round_, worker = self.engine, self.round, self.engine.worker
        with engine.swarm.changed:
            if not engine.swarm.changed.wait_for(lambda: round_.decision is not None, self.deadline - time.monotonic()):
                round_.left_out.add(worker)
                round_.posted.pop(worker, None)
                raise RoundFailed(f"round {self.key.sequence}: not complete before the deadline", resync=False)
        decision = round_.decision
        assert decision is not None
        if worker in round_.left_out or worker not in round_.headers:
            engine.must_fetch = bool(decision.contributors)
            raise RoundFailed(f"round {self.key.sequence}: it ended without worker {worker}", resync=engine.must_fetch)
        members = tuple(round_.headers[w].member for w in sorted(round_.headers))
        engine._members = members
        apart = {members[position].worker for position in diverged([m.anchor_digest for m in members])}
        engine.must_fetch = engine.must_fetch or worker in apart
        if round_.mean is not None:
            self.vector.mean.data.copy_(round_.mean)
        others = HEADER_BYTES * (len(round_.roster) - 1)
        return RoundResult(
            mean=self.vector.mean,
            bytes_sent=others,
            bytes_received=others,
            seconds=0.0,
            members=members,
            resync=worker in apart,
            roster=round_.roster,
            **decision.summary_fields(),
        )


@dataclass
class Worker:
    """One worker of the world; its batches follow from the inner steps that it has taken itself."""

    number: int
    model: Net
    optimizer: DiLoCo

    @property
    def loop(self):  # type: ignore[no-untyped-def]
        return self.optimizer.loop


class ElasticWorld:
    """Workers in one thread: the test says which takes a step, which posts and which merges."""

    def __init__(
        self,
        workers: int,
        sync: SyncConfig,
        outer: OuterOptimizer | None = None,
        *,
        drop: Collection[tuple[int, int]] = (),
        sgd: bool = False,
        **more: Any,
    ) -> None:
        """`more`: for DiLoCo."""
        self.more = more
        self.sync, self.outer_optimizer, self.sgd = sync, outer, sgd
        self.swarm = ElasticSwarm(range(workers), drop=drop)
        self.workers: dict[int, Worker] = {}
        for number in range(workers):
            self.join(number)

    def join(self, number: int) -> Worker:
        inner = (lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) if self.sgd else None
        built = build(self.swarm.engine(number), self.sync, outer=self.outer_optimizer, inner=inner, **self.more)
        self.workers[number] = Worker(number, *built)
        return self.workers[number]

    def leave(self, number: int) -> None:
        del self.workers[number]
        self.swarm.leave(number)

    def inner_step(self, *numbers: int, times: int = 1) -> None:
        for worker in self._of(numbers):
            for _ in range(times):
                worker.optimizer.zero_grad()
                loss_of(worker.model, worker.number, worker.loop.state.steps_taken).backward()
                worker.optimizer.inner_step()

    def post(self, *numbers: int) -> None:
        for worker in self._of(numbers):
            worker.optimizer.post()
            worker.loop.replica.finish_posts()  # in one thread, the others may look for it at once

    def merge(self, *numbers: int) -> None:
        for worker in self._of(numbers):
            worker.optimizer.merge()

    def step(self, *numbers: int, times: int = 1) -> None:
        for _ in range(times):
            self.inner_step(*numbers)
            self.post(*numbers)
            self.merge(*numbers)

    def _of(self, numbers: Collection[int]) -> list[Worker]:
        return [self.workers[number] for number in (numbers or sorted(self.workers))]

    def digests(self) -> set[str]:
        return {worker.optimizer.anchor_digest() for worker in self.workers.values()}

    def finish(self, *numbers: int, early: bool = False) -> None:
        """Each in a thread of its own."""
        errors: list[BaseException] = []

        def run(worker: Worker) -> None:
            try:
                worker.optimizer.finish(early=early)
            except BaseException as error:  # noqa: BLE001  raised again below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in self._of(numbers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200.0)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a worker hangs in finish"
