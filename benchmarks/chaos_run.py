"""A chaos run in progress: its workers, what is done to them (chaos_plan.py), and when it is over."""

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import search_path  # noqa: F401  `support` of the tests
from chaos_plan import Plan
from support.chaos.story import Chronicle, Lives
from support.chaos.stranger import intrude
from support.chaos.worker import H, Task, train
from support.swarm.processes import Worker, Workers

_POLL_SECONDS = 0.1
_START_SECONDS = 120.0
_SLOWNESS = 3.0
_FEWEST = 2
"""No honest worker is hurt when there are no more than these."""
_MOST = 5
"""No honest worker joins when there are so many."""
_ROUNDS_TO_RETURN = 10  # before the last one
_AT_ONCE = 2
"""Deeds after one round. None while the network is cut, so that a majority is left."""
_RECENT = 3
_FEWEST_CUT = 4
"""None is cut off when there are fewer: two that are left cannot tell a split from a death."""


@dataclass
class Life:
    """One process of a machine."""

    name: str
    machine: str
    worker: Worker
    honest: bool
    doomed: bool = False
    """It was killed, or frozen for good."""
    thaws_at: float | None = None
    copy_of: str = ""
    """The machine whose run folder it has a copy of."""
    replaced: bool = False
    """It was frozen until a copy had its place: it must end when it thaws."""


@dataclass
class Chaos:
    """A run in progress."""

    plan: Plan
    workers: Workers
    lives: list[Life] = field(default_factory=list)
    done: list[tuple[float, int, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    waiting_copies: dict[str, Life] = field(default_factory=dict)
    """Copies that have not begun yet -> the frozen originals, which thaw then."""
    sides: list[list[str]] = field(default_factory=list)
    """Machines that a cut keeps apart."""
    heals_at: float = 0.0
    due: list[str] = field(default_factory=list)
    """Deeds that wait for the end of a round, and until a cut has healed."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.plan.seed + 1)
        self.read()

    def read(self) -> None:
        """Read what the workers have written down until now."""
        self.chronicle = Chronicle([self._story(life.name) for life in self.lives])

    @property
    def sorts(self) -> Lives:
        """The workers by kind. One that came too late to begin before the end has nothing to finish."""
        begun = {line["life"] for line in self.chronicle.of("start")}
        liars = [life.name for life in self.lives if life.machine in ("nan", "huge")]
        return Lives(
            frozenset(name for name in liars if name.endswith(".0")),
            frozenset(life.name for life in self.lives if life.machine == "stranger" or life.copy_of)
            | frozenset(name for name in liars if not name.endswith(".0")),
            frozenset(life.name for life in self.lives if life.honest and not life.doomed and life.name in begun),
            frozenset(life.name for life in self.lives if life.replaced),
            frozenset(life.name for life in self.lives if life.machine in ("greedy", "changing")),
        )

    def _story(self, name: str) -> Path:
        return self.workers.folder / f"{name}.jsonl"

    # Starting

    def _task(self, machine: str, lie: str = "") -> Task:
        name = f"{machine}.{sum(life.machine == machine for life in self.lives)}"
        slowness = _SLOWNESS if machine == "slow" else 1.0
        return Task(self.plan.rounds, self._story(name), name, self.plan.step_seconds * slowness, lie)

    def start(self, machine: str, *, lie: str = "") -> Life:
        task = self._task(machine, lie)
        life = Life(
            task.life, machine, self.workers.start(machine, train, task), honest=lie in ("", "greedy", "changing")
        )
        self.lives.append(life)
        return life

    def join(self, machine: str, lie: str = "") -> str:
        """Start a worker that trains as soon as it can."""
        life = self.start(machine, lie=lie)
        life.worker.say("go")
        return life.name

    def intrude(self) -> str:
        task = self._task("stranger")
        run = self.workers.key.run_id
        worker = self.workers.start("stranger", intrude, task, run, self.workers.addresses())
        self.lives.append(Life(task.life, "stranger", worker, honest=False))
        return task.life

    def copy(self, original: Life) -> Life:
        """Start a second process with the identity of a worker, as from a copied run folder."""
        machine = f"copy-{len(self.lives)}"
        shutil.copytree(self.workers.folder / original.machine / "swarm", self.workers.folder / machine / "swarm")
        life = self.start(machine)
        life.worker.say("go")
        return life

    def copy_live(self, original: Life) -> str:
        """Start a copy of a worker that lives; it must be refused."""
        life = self.copy(original)
        life.honest = False
        life.copy_of = original.machine
        return f"{life.name} has the identity of {original.name}"

    def freeze_and_copy(self, original: Life) -> str:
        """Freeze a worker until a copy of it trains; the copy must take its place, and keep it then."""
        original.worker.freeze()
        original.doomed = original.replaced = True
        life = self.copy(original)
        self.waiting_copies[life.name] = original
        return f"SIGSTOP for {original.name}; {life.name} has its identity"

    def begin(self) -> None:
        """Start the first workers: the first of all founds the run, the second is the slow one."""
        self.start("founder").worker.hear(_START_SECONDS)
        self.start("slow")
        for index in range(2, self.plan.workers):
            self.start(f"machine-{index}")
        for life in self.lives[1:]:
            life.worker.hear(_START_SECONDS)
        for life in self.lives:
            life.worker.say("go")
        self.read()

    # Deeds

    def at_peace(self) -> list[Life]:
        """List the honest workers that were in one of the last rounds and have a sidecar: others may lack the state."""
        ended = self.chronicle.ended()
        rounds = [line for line in self.chronicle.of("round") if line["failure"] is None]
        begun = {line["life"] for line in rounds if line["round"] > ended - _RECENT}
        sidecars = {line["life"]: line["type"] for line in self.chronicle.of("event") if "sidecar" in line["type"]}
        begun -= {life for life, last in sidecars.items() if last == "sidecar_lost"}
        return [
            life
            for life in self.lives
            if life.honest and life.name in begun and not life.doomed and life.thaws_at is None and life.worker.alive
        ]

    def do(self, kind: str, ended: int) -> None:
        at_peace = self.at_peace()
        copied = {life.copy_of for life in self.lives if life.worker.alive} | {"founder"}  # they must stay
        originals = [life for life in at_peace if life.machine not in copied]
        victims = originals if len(at_peace) > _FEWEST else []
        running = {life.machine for life in self.lives if life.worker.alive}
        doomed = [life.machine for life in self.lives if life.honest and life.doomed and not life.replaced]
        gone = [machine for machine in dict.fromkeys(doomed) if machine not in running]
        text = ""
        match kind:
            case "nan" | "huge":
                text = f"{self.join(kind, lie=kind)} joins, and sends {'NaN' if kind == 'nan' else '1e30'}"
            case "greedy":
                text = f"{self.join(kind, lie=kind)} joins, and claims five rounds of work in every round"
            case "changing":
                text = f"{self.join(kind, lie=kind)} joins, and changes its lie from round to round"
            case "cut" if self.workers.net is not None and len(at_peace) >= _FEWEST_CUT:
                text = self.cut()
            case "stranger":
                text = f"{self.intrude()} comes without an invitation"
            case "copy" if originals:
                text = self.copy_live(self.chance.choice(originals))
            case "freeze and copy" if victims:
                text = self.freeze_and_copy(self.chance.choice(victims))
            case "liar returns" if not any(life.worker.alive for life in self.lives if life.machine == "nan"):
                text = f"{self.join('nan', lie='nan')} wants to come back"
            case "join" if len(at_peace) < _MOST:
                text = f"{self.join(f'machine-{len(self.lives)}')} joins"
            case "return" if gone:
                text = f"{self.join(self.chance.choice(gone))} comes back to life"
            case "kill the first":
                text = self.hurt("kill", self.lives[0])
            case "kill" | "freeze" | "freeze and thaw" | "sleep" | "sidecar" | "p2pd" if victims:
                text = self.hurt(kind, self.chance.choice(victims))
        second = time.monotonic() - self.started
        text = text or f"({kind}: not now)"
        self.done.append((second, ended, text))
        print(f"{second:.1f} s, after round {ended}: {text}", flush=True)

    def hurt(self, kind: str, victim: Life) -> str:
        match kind:
            case "kill":
                victim.doomed = True
                victim.worker.kill()
                return f"SIGKILL for {victim.name}"
            case "freeze":
                victim.doomed = True
                victim.worker.freeze()
                return f"SIGSTOP for {victim.name}"
            case "freeze and thaw" | "sleep":
                low, high = (0.3, 2.5) if kind == "freeze and thaw" else (2.0, 4.0)
                seconds = self.plan.lost_seconds * self.chance.uniform(low, high)
                victim.worker.freeze()
                victim.thaws_at = time.monotonic() + seconds
                return f"SIGSTOP for {victim.name}, for {seconds:.1f} s"
        pid = victim.worker.sidecar() if kind == "sidecar" else victim.worker.p2pd()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return f"SIGKILL for the {kind} of {victim.name}"

    def cut(self) -> str:
        """Split the network for a while: some machines, fewer than half, against the others."""
        assert self.workers.net is not None
        machines = list(dict.fromkeys(life.machine for life in self.lives if life.worker.alive))
        self.chance.shuffle(machines)
        num_cut_off = self.chance.randint(1, (len(machines) - 1) // 2)
        seconds = self.plan.lost_seconds * self.chance.uniform(0.5, 3.0)
        self.sides = [machines[:num_cut_off], machines[num_cut_off:]]
        self.heals_at = time.monotonic() + seconds
        self.workers.net.cut(self.sides)
        return f"{' and '.join(machines[:num_cut_off])} cut off from all others, for {seconds:.1f} s"

    def _heal(self) -> None:
        if self.sides and (time.monotonic() > self.heals_at or self._ends_soon()):
            assert self.workers.net is not None
            self.workers.net.heal(self.sides)
            self.sides = []

    # The run

    def run(self) -> None:
        deeds = self.plan.deeds()
        ended = -1
        last_progress = time.monotonic()
        while not self._over():
            time.sleep(_POLL_SECONDS)
            self.read()
            self._thaw()
            self._heal()
            newest = self.chronicle.ended()
            if newest > ended:
                self.due += [kind for number in range(ended + 1, newest + 1) for kind in deeds.get(number, ())]
                for _ in range(0 if self.sides else min(_AT_ONCE, len(self.due))):
                    time.sleep(self.chance.uniform(0.0, H * self.plan.step_seconds / 2))
                    self.do(self.due.pop(0), newest)
                ended = newest
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self.plan.round_seconds:
                raise SystemExit(
                    f"hang: no round has ended for {self.plan.round_seconds:g} s after round {ended}; "
                    f"these have not ended: {self._waiting()}"
                )

    def _thaw(self) -> None:
        for life in self.lives:
            if life.thaws_at is not None and (time.monotonic() > life.thaws_at or self._ends_soon()):
                life.worker.thaw()
                life.thaws_at = None
        trained = {line["life"] for line in self.chronicle.of("round") if line["failure"] is None}
        for name in trained & self.waiting_copies.keys():
            self.waiting_copies.pop(name).worker.thaw()

    def _ends_soon(self) -> bool:
        """Whether the end is near: a worker that wakes when the others are gone could only go on alone."""
        return self.chronicle.ended() > self.plan.rounds - _ROUNDS_TO_RETURN

    def _over(self) -> bool:
        return not self._waiting()

    def _waiting(self) -> list[str]:
        """List the workers that must come to the end and have not, and strangers without an answer yet."""
        sorts = self.sorts
        answered = {line["life"] for line in self.chronicle.of("error")}
        expected = sorts.finishing | (sorts.strangers - answered) | sorts.replaced
        return [life.name for life in self.lives if life.name in expected and life.worker.alive]
