"""Seeded schedules of faults for a swarm in memory, on a virtual clock: what every one of them must end with.

A seed decides how many workers there are and what happens to them: calls that are lost, doubled or slow, machines and
pairs that are cut off from each other, splits, crashes with and without a return, sleeps. Meanwhile the workers train.

    one mean    no two workers count different means for one round (`ScheduleResult.means`). What a worker had counted
                before it crashed is gone with it, unless another worker has it too
    no end      after the last fault a round with the work of every worker ends within `SETTLING_SECONDS`, and after it
                all have the same state
    no liar     no honest worker is held to have lied by another (`ScheduleResult.offences`)
    no fault    no worker's program fails (`ScheduleResult.faults_found`)

With `lies`, some workers lie from their start on, each in one of the ways of lies.py. One is the last worker, in one of
LIES; several are drawn from the seed, each in one of ALL_LIES. The rest then holds for the others; but a schedule in
which half of a round's contributors lie is outside what the protocol assumes, and need not settle. A leader that gets
two plans certified has two means counted once, or twice if its helper leads after it.

The model has a part for each worker or more, so that all that contribute reduce, as in any model of a thousand
parameters a worker. With one part only one worker would see in each attempt which of the others sends nothing.
"""

import asyncio
import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diloco.errors import EngineError, Excluded
from diloco.swarm.audit.auditor import Auditor
from diloco.swarm.node.audit import Audit
from diloco.swarm.node.round import OwnRound
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.simulator import lies, virtual_clock
from diloco.swarm.simulator.network import Fate
from diloco.swarm.simulator.stories import sleep, stop
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, values

FAULT_SECONDS = 40.0
SETTLING_SECONDS = 150.0
_NUMEL = 8 * 1024  # eight parts: a power of two, so that the proof of each is as long, whichever is asked for
LIES = ("ended", "two means", "wrong mean", "accuses", "state")
ALL_LIES = (
    *LIES, "accuses all", "says withheld", "ahead", "certifies", "two plans", "sends no parts", "sends no mean",
    "never posts", "turned around", "long parts", "not finite", "second key", "directions",
)  # fmt: skip
_OF_A_NODE = ("ended", "state", "ahead", "certifies", "second key")
"""They change one process of a worker: after a crash its next one must begin anew."""
_KINDS = ["lossy", "slow", "cut", "split", "pair", "crash", "sleep"]


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    seconds: float
    who: tuple[int, ...]


@dataclass
class ScheduleResult:
    """The outcome of a schedule."""

    seed: int
    workers: int
    faults: list[Fault]
    means: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    """Round -> mean -> the lives that have counted it."""
    offences: list[str] = field(default_factory=list)
    """What honest workers hold against each other."""
    faults_found: list[str] = field(default_factory=list)
    """Faults of a worker's own program."""
    problem: str = ""
    outside: bool = False
    """Liars were half of a round's members: which of two states is right, a third one cannot tell (protocol.md)."""
    settled_seconds: float = 0.0
    rounds_after: int = 0
    """Rounds that ended after the last fault before one had the work of all."""
    lies: tuple[str, ...] = ()
    calls: str = ""
    """The digest of all calls, answers, streams and events, with their times: the same in every run of a seed."""

    def problems(self) -> list[str]:
        several = [f"round {number} has {len(means)} means: {means}" for number, means in sorted(self.means.items())
                   if len(means) > 1]  # fmt: skip
        several = several if len(several) > 2 * ("two plans" in self.lies) else []
        return (
            several + self.offences + self.faults_found + ([self.problem] if self.problem and not self.outside else [])
        )


def draw(seed: int) -> tuple[int, list[Fault]]:
    """Draw the number of workers, and the faults in the order of their time."""
    chance = random.Random(seed)
    workers = chance.randint(3, 5)
    faults = []
    for _ in range(chance.randint(2, 7)):
        who = tuple(chance.sample(range(workers), workers))
        faults.append(Fault(chance.uniform(1.0, FAULT_SECONDS), chance.choice(_KINDS), chance.uniform(0.5, 12.0), who))
    return workers, sorted(faults, key=lambda fault: fault.at)


def draw_lies(seed: int, count: int) -> tuple[str, ...]:
    chance = random.Random(f"lies {seed}")
    return tuple(chance.choice(ALL_LIES) for _ in range(count))


def lies_of(seed: int, count: int) -> tuple[str, ...]:
    """Draw one lie of LIES in turn, or several that are drawn from all."""
    return (LIES[seed % len(LIES)],) if count == 1 else draw_lies(seed, count)


class FaultSchedule:
    def __init__(
        self, seed: int, workers: int, faults: list[Fault], lies: tuple[str, ...] = (), audit: type[Audit] = Auditor
    ) -> None:
        self.result = ScheduleResult(seed, workers, faults, lies=lies)
        among = random.Random(f"liars {seed}").sample(range(workers), len(lies))
        self._audit = audit
        self._lies = dict(zip(among if len(lies) > 1 else [workers - 1], lies, strict=False))
        """The worker -> how it lies."""
        self._liars: set[str] = set()
        self._chance = random.Random(seed)
        self._lives: dict[int, MemoryWorker] = {}
        self._training: dict[int, asyncio.Task[None]] = {}
        self._busy: set[int] = set()
        """Workers that are down, asleep or about to be so: one thing at a time."""
        self._loss = 0.0
        self._delay = 0.0
        self._log: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._full: list[int] = []
        """Rounds that had the work of all workers."""

    async def run(self) -> ScheduleResult:
        with lies.Patches() as patch:
            return await self._run(patch)

    async def _run(self, patch: lies.Patches) -> ScheduleResult:
        self._swarm = MemorySwarm(
            lost_seconds=1.0, beat_seconds=0.2, patience=0.5, timeout_seconds=60.0, audit=self._audit
        )
        network = self._swarm.network
        network.fate = self._fate
        network.delay = lambda: self._chance.uniform(0.0, self._delay)
        for index in range(self.result.workers):
            await self._start(index)
        self._patch = patch
        self._liars = {self._lives[index].name for index in self._lies}
        for index in self._lies:
            self._begin_to_lie(index)
        begun = asyncio.get_running_loop().time()
        faults = [asyncio.create_task(self._inflict(fault, begun)) for fault in self.result.faults]
        await asyncio.gather(*faults)
        await self._settle()
        for task in self._training.values():
            task.cancel()
        await self._swarm.close()
        self.result.calls = network.trace.digest()
        self.result.means = {number: dict(means) for number, means in self._log.items()}
        return self.result

    # Workers

    async def _start(self, index: int, folder: Path | None = None) -> None:
        name = self._lives[index].name if index in self._lives else None
        worker = await self._swarm.start(name=name, folder=folder)
        self._lives[index] = worker
        outcomes = worker.node.outcomes
        life = f"{index}.{len(self._swarm.workers)}"
        emit = worker.trainer.emit

        def tell(type_: str, fields: Mapping[str, Any]) -> None:
            self._swarm.network.trace.record(worker.name, "event", type_)
            if type_ in ("internal_error", "check_failed") and worker.name not in self._liars:
                self.result.faults_found.append(f"{life}: {type_} {fields}")
            emit(type_, fields)

        worker.trainer.emit = tell  # type: ignore[method-assign]
        record_offence = worker.node.permissions.record_offence

        def note(peer: str, reason: str) -> bool:
            if self._liars.isdisjoint((peer, worker.name)):
                self.result.offences.append(f"{life} holds {peer[-4:]} to have lied: {reason}")
            return record_offence(peer, reason)

        worker.node.permissions.record_offence = note  # type: ignore[method-assign]
        ban = worker.node.permissions.ban

        def note_ban(peer: str, reason: str) -> None:
            if self._liars.isdisjoint((peer, worker.name)):
                self.result.offences.append(f"{life} bans {peer[-4:]}: {reason}")
            ban(peer, reason)

        worker.node.permissions.ban = note_ban  # type: ignore[method-assign]
        succeed = outcomes.succeed

        def record(round_: OwnRound, plan: Plan) -> None:
            if plan.has_mean and not round_.ended:
                contributors = {entry.peer for entry in plan.contributors}
                self.result.outside |= 2 * len(self._liars & contributors) >= len(contributors)
                if contributors >= self._honest() and worker.name not in self._liars:
                    self._full.append(round_.sequence)
                if self._full and worker.name not in self._liars:  # before, no members have agreed on anything
                    digest = hashlib.sha256(bytes(round_.posted.mean.view)).hexdigest()[:12]
                    self._log[round_.sequence][digest].add(life)
            succeed(round_, plan)

        outcomes.succeed = record  # type: ignore[method-assign]
        worker.life = life  # type: ignore[attr-defined]
        self._training[index] = asyncio.create_task(self._train(index, worker))
        if self._lies.get(index) in _OF_A_NODE and self._liars:  # a process that takes the place of a crashed one
            self._begin_to_lie(index)

    def _honest(self) -> set[str]:
        return {worker.name for worker in self._lives.values()} - self._liars

    def _begin_to_lie(self, index: int) -> None:
        liar = self._lives[index]
        patch = self._patch
        honest = [worker for other, worker in self._lives.items() if other not in self._lies]
        others = [self._lives[other] for other in self._lies if other != index]
        victim = honest[0]
        match self._lies[index]:
            case "ended":
                lies.claims_the_end(self._swarm, liar)
            case "two means":
                lies.gives_others_another_mean(liar, {victim.name}, patch)
            case "wrong mean":
                lies.reduces_wrongly(liar, torch.neg, patch)
            case "accuses":
                lies.accuses(liar, [victim], patch)
            case "accuses all":
                lies.accuses(liar, honest, patch)
            case "says withheld":
                lies.accuses(liar, [victim], patch, lie=False, withheld="parts")
            case "state":
                lies.serves_another_state(liar)
            case "ahead":
                lies.serves_another_state(liar, ahead=3)
            case "certifies":
                lies.certify_alone([liar, *others])
            case "two plans":
                half = len(honest) // 2
                lies.certifies_two_plans(liar, others, [honest[:half], honest[half:]], patch)
            case "sends no parts":
                lies.withholds(liar, "_send", patch)
            case "sends no mean":
                lies.withholds(liar, "_send_mean", patch)
            case "second key":
                lies.brings_a_second_key(liar, patch)
            case "directions":
                lies.tells_that_all_point_against(victim, liar, patch)

    def _contribution(self, index: int, work: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what a worker posts, and what it claims of it."""
        match self._lies.get(index):
            case "turned around":
                return -2.9 * work, {}
            case "long parts":
                return 1e6 * work, {"claimed": float(torch.linalg.vector_norm(work))}
            case "not finite":
                return work, {"claimed": math.nan}
        return work, {}

    async def _train(self, index: int, worker: MemoryWorker) -> None:
        """Act as the trainer: a round that failed is not posted again, its number is spent."""
        trainer = worker.trainer
        loop = asyncio.get_running_loop()
        await worker.catch_up()
        while True:
            end = loop.time() + self._chance.uniform(0.3, 1.2)
            while loop.time() < end and not any(call >= trainer.sequence for call in trainer.calls):
                await asyncio.sleep(0.1)
            digest = hashlib.sha256(b"".join(trainer.means)).hexdigest()[:16]
            sequence = trainer.sequence
            work, claims = self._contribution(index, values(worker.node.number, sequence, _NUMEL))
            while self._lies.get(index) == "never posts":
                await asyncio.sleep(10.0)
            outcome, _ = await worker.post(work, digest=digest, seconds=30.0, **claims)
            if outcome.fatal and worker.name in self._liars:
                return
            if outcome.fatal:
                raise EngineError(str(outcome.failure))
            if outcome.failure is not None:
                trainer.sequence = max(trainer.sequence, sequence + 1)
            while outcome.resync:
                try:
                    await worker.catch_up()
                    break
                except EngineError:
                    await asyncio.sleep(1.0)

    # Faults

    def _fate(self, caller: str, peer: str, request: bytes) -> Fate:
        del caller, peer, request
        if self._chance.random() >= self._loss:
            return "arrives"
        return self._chance.choice(["lost", "answer lost", "twice"])

    async def _inflict(self, fault: Fault, begun: float) -> None:
        await asyncio.sleep(begun + fault.at - asyncio.get_running_loop().time())
        network = self._swarm.network
        names = [self._lives[index].name for index in fault.who]
        match fault.kind:
            case "lossy":
                self._loss += 0.15
                await asyncio.sleep(fault.seconds)
                self._loss = max(0.0, self._loss - 0.15)
            case "slow":
                self._delay += 0.4
                await asyncio.sleep(fault.seconds)
                self._delay = max(0.0, self._delay - 0.4)
            case "split" if not network.sides:
                half = len(names) // 2
                network.sides = [set(names[:half]), set(names[half:])]
                await asyncio.sleep(fault.seconds)
                network.sides = []
            case "pair":
                network.pairs.append(set(names[:2]))
                await asyncio.sleep(fault.seconds)
                network.pairs.remove(set(names[:2]))
            case "cut" | "crash" | "sleep" if fault.who[0] not in self._busy and self._may_hurt(fault.kind):
                self._busy.add(fault.who[0])
                await self._hurt(fault.who[0], fault)
                self._busy.discard(fault.who[0])

    def _may_hurt(self, kind: str) -> bool:
        """A crash leaves three: two alone cannot tell a split from a death, and go on on both sides of one."""
        return len(self._busy) < (2 if kind != "crash" else self.result.workers - 3 - len(self._lies))

    async def _hurt(self, index: int, fault: Fault) -> None:
        network = self._swarm.network
        worker = self._lives[index]
        if fault.kind == "cut":
            network.cut.add(worker.name)
            await asyncio.sleep(fault.seconds)
            network.cut.discard(worker.name)
        elif fault.kind == "sleep":
            await sleep(self._swarm, worker, fault.seconds)
        else:
            self._training[index].cancel()
            stop(self._swarm, worker)
            for means in self._log.values():
                for lives in means.values():
                    lives.discard(worker.life)  # type: ignore[attr-defined]
                for mean in [mean for mean, lives in means.items() if not lives]:
                    del means[mean]
            await asyncio.sleep(fault.seconds)
            await self._return(index, Path(worker.node.settings.folder))

    async def _return(self, index: int, folder: Path) -> None:
        for _ in range(10):
            try:
                await self._start(index, folder)
                return
            except Excluded:
                if self._lives[index].name not in self._liars:
                    raise
                return  # it is banned
            except EngineError as error:
                problem = error
                await asyncio.sleep(2.0)
        if self._lives[index].name not in self._liars:
            self.result.problem = f"worker {index} could not come back: {problem}"

    # The end

    async def _settle(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        known = len(self._full)
        before = max(self._log, default=-1)
        while len(self._full) < known + self.result.workers - len(self._lies):
            honest = [index for index, worker in self._lives.items() if worker.name not in self._liars]
            failed = [task for index, task in self._training.items() if task.done() and index in honest]
            if failed or self.result.problem:
                why = "" if not failed or failed[0].cancelled() else f"a worker ended: {failed[0].exception()!r}"
                self.result.problem = self.result.problem or why
                return
            if loop.time() - started > SETTLING_SECONDS:
                states = {
                    index: f"{worker.node.own} leads {worker.node.leader.phases()}"
                    for index, worker in self._lives.items()
                }
                self.result.problem = f"no round had the work of all for {SETTLING_SECONDS:g} s; {states}"
                return
            await asyncio.sleep(0.2)
        self.result.settled_seconds = loop.time() - started
        self.result.rounds_after = sum(before < number < self._full[known] for number in self._log)


def run(
    seed: int,
    workers: int | None = None,
    faults: list[Fault] | None = None,
    lies: tuple[str, ...] = (),
    audit: type[Audit] = Auditor,
) -> ScheduleResult:
    """The schedule of this seed, or another one with its chances (a shrunk one). With `audit` Audit, the workers trust
    each other."""
    drawn = draw(seed)
    workers = workers or drawn[0] + len(lies)  # three honest ones at least
    schedule = FaultSchedule(seed, workers, drawn[1] if faults is None else faults, lies, audit)
    return virtual_clock.run(schedule.run())
