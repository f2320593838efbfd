"""The swarm under violence: a small language model trains while its workers are killed, frozen, lied to and joined.

    python benchmarks/chaos.py --rounds 60 --seed 0

Workers are real ones, each a trainer, a sidecar and a p2pd on this machine. One is three times slower than the others,
one sends NaN, one sends 1e30 and claims a small norm, one was not invited, one has the identity of a live one, one that
of a frozen one, and keeps its place when that one thaws; the first worker dies for good; others die, freeze (some thaw
later), come back, and new ones join, at moments that the seed decides. What must be true of it is in
tests/support/chaos/story.py. The final loss is held against that of a calm run of as many rounds with the usual number
of workers.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

import search_path  # noqa: F401  `support` of the tests
from measuring import write_results
from support.chaos.story import Chronicle, Lives
from support.chaos.stranger import intrude
from support.chaos.worker import H, Task, calm, train
from support.swarm.processes import Worker, Workers

MOST_LOSS = 1.021
"""Times the calm run's."""
_POLL_SECONDS = 0.05
_START_SECONDS = 120.0
_SLOWNESS = 3.0
_FEWEST_ROUNDS = 16
_FEWEST, _MOST = 2, 5
"""Honest workers: none is hurt when there are no more than these, none joins when there are so many."""


@dataclass(frozen=True)
class Plan:
    """What is done, by the round after which it is done: drawn before the run, so that a seed is a plan."""

    rounds: int
    seed: int
    lost_seconds: float
    step_seconds: float
    workers: int = 4
    every: int = 3
    """Rounds between two deeds."""
    round_seconds: float = 40.0
    """A round that takes longer is a hang."""
    most_loss: float = MOST_LOSS

    def deeds(self) -> dict[int, list[str]]:
        """The kinds, by round. What must be seen comes for certain and first, the rest as the dice fall."""
        chance = random.Random(self.seed)
        certain = ["nan", "huge", "join", "stranger", "copy", "kill the first"]
        certain += ["freeze and copy", "freeze and thaw", "kill", "return", "sidecar"]
        more = ["kill", "freeze", "freeze and thaw", "join", "return", "sidecar", "p2pd", "copy", "freeze and copy"]
        more.append("liar returns")
        quiet = max(6, self.rounds // 4)  # at the end, so that a worker whose sidecar was killed is back before it
        slots = list(range(0, self.rounds - quiet, self.every))
        kinds = certain + chance.choices(more, k=max(0, len(slots) - len(certain)))
        deeds: dict[int, list[str]] = {}
        for index, kind in enumerate(kinds):
            deeds.setdefault(slots[index % len(slots)], []).append(kind)
        return deeds


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

    def __post_init__(self) -> None:
        self.chance = random.Random(self.plan.seed + 1)

    @property
    def chronicle(self) -> Chronicle:
        return Chronicle([self._story(life.name) for life in self.lives])

    @property
    def sorts(self) -> Lives:
        """A worker that came too late to begin before the end has nothing to finish."""
        begun = {line["life"] for line in self.chronicle.of("start")}
        liars = [life.name for life in self.lives if life.machine in ("nan", "huge")]
        return Lives(
            frozenset(name for name in liars if name.endswith(".0")),
            frozenset(life.name for life in self.lives if life.machine == "stranger" or life.copy_of)
            | frozenset(name for name in liars if not name.endswith(".0")),
            frozenset(life.name for life in self.lives if life.honest and not life.doomed and life.name in begun),
            frozenset(life.name for life in self.lives if life.replaced),
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
        life = Life(task.life, machine, self.workers.start(machine, train, task), honest=not lie)
        self.lives.append(life)
        return life

    def join(self, machine: str, lie: str = "") -> str:
        """A worker that trains as soon as it can."""
        life = self.start(machine, lie=lie)
        life.worker.say("go")
        return life.name

    def intrude(self) -> str:
        task, run = self._task("stranger"), self.workers.key.run_id
        worker = self.workers.start("stranger", intrude, task, run, self.workers.addresses())
        self.lives.append(Life(task.life, "stranger", worker, honest=False))
        return task.life

    def copy(self, original: Life) -> Life:
        """A second process with the identity of a worker, as from a copied run folder."""
        machine = f"copy-{len(self.lives)}"
        shutil.copytree(self.workers.folder / original.machine / "swarm", self.workers.folder / machine / "swarm")
        life = self.start(machine)
        life.worker.say("go")
        return life

    def copy_live(self, original: Life) -> str:
        """It must be refused."""
        life = self.copy(original)
        life.honest, life.copy_of = False, original.machine
        return f"{life.name} has the identity of {original.name}"

    def freeze_and_copy(self, original: Life) -> str:
        """The copy must take the place of a worker that is frozen until the copy trains, and keep it then."""
        original.worker.freeze()
        original.doomed = original.replaced = True
        life = self.copy(original)
        self.waiting_copies[life.name] = original
        return f"SIGSTOP for {original.name}; {life.name} has its identity"

    def begin(self) -> None:
        """The first workers; the first of all founds the run, the second is the slow one."""
        self.start("founder").worker.hear(_START_SECONDS)
        self.start("slow")
        for index in range(2, self.plan.workers):
            self.start(f"machine-{index}")
        for life in self.lives[1:]:
            life.worker.hear(_START_SECONDS)
        for life in self.lives:
            life.worker.say("go")

    # Deeds

    def at_peace(self) -> list[Life]:
        """Honest workers that train."""
        begun = {line["life"] for line in self.chronicle.of("start")}
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
        what = ""
        match kind:
            case "nan" | "huge":
                what = f"{self.join(kind, lie=kind)} joins, and sends {'NaN' if kind == 'nan' else '1e30'}"
            case "stranger":
                what = f"{self.intrude()} comes without an invitation"
            case "copy" if originals:
                what = self.copy_live(self.chance.choice(originals))
            case "freeze and copy" if victims:
                what = self.freeze_and_copy(self.chance.choice(victims))
            case "liar returns" if not any(life.worker.alive for life in self.lives if life.machine == "nan"):
                what = f"{self.join('nan', lie='nan')} wants to come back"
            case "join" if len(at_peace) < _MOST:
                what = f"{self.join(f'machine-{len(self.lives)}')} joins"
            case "return" if gone:
                what = f"{self.join(self.chance.choice(gone))} comes back to life"
            case "kill the first":
                what = self.hurt("kill", self.lives[0])
            case "kill" | "freeze" | "freeze and thaw" | "sidecar" | "p2pd" if victims:
                what = self.hurt(kind, self.chance.choice(victims))
        self.done.append((time.monotonic() - self.started, ended, what or f"({kind}: not now)"))

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
            case "freeze and thaw":
                seconds = self.plan.lost_seconds * self.chance.uniform(0.3, 2.5)
                victim.worker.freeze()
                victim.thaws_at = time.monotonic() + seconds
                return f"SIGSTOP for {victim.name}, for {seconds:.1f} s"
        pid = victim.worker.sidecar() if kind == "sidecar" else victim.worker.p2pd()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return f"SIGKILL for the {kind} of {victim.name}"

    # The run

    def run(self) -> None:
        deeds = self.plan.deeds()
        ended, moved = -1, time.monotonic()
        while not self._over():
            time.sleep(_POLL_SECONDS)
            self._thaw()
            now = self.chronicle.ended()
            if now > ended:
                for kind in [kind for number in range(ended + 1, now + 1) for kind in deeds.get(number, ())]:
                    time.sleep(self.chance.uniform(0.0, H * self.plan.step_seconds / 2))
                    self.do(kind, now)
                ended, moved = now, time.monotonic()
            elif time.monotonic() - moved > self.plan.round_seconds:
                raise SystemExit(
                    f"hang: no round has ended for {self.plan.round_seconds:g} s after round {ended}; "
                    f"these have not ended: {self._waiting()}"
                )

    def _thaw(self) -> None:
        for life in self.lives:
            if life.thaws_at is not None and time.monotonic() > life.thaws_at:
                life.worker.thaw()
                life.thaws_at = None
        trained = {line["life"] for line in self.chronicle.of("round") if line["failure"] is None}
        for name in trained & self.waiting_copies.keys():
            self.waiting_copies.pop(name).worker.thaw()

    def _over(self) -> bool:
        return not self._waiting()

    def _waiting(self) -> list[str]:
        """Workers that must come to the end and have not, and strangers without an answer yet."""
        sorts = self.sorts
        answered = {line["life"] for line in self.chronicle.of("error")}
        expected = sorts.finishing | (sorts.strangers - answered) | sorts.replaced
        return [life.name for life in self.lives if life.name in expected and life.worker.alive]


@dataclass(frozen=True)
class Outcome:
    faults: list[str]
    loss: float
    calm_loss: float
    counts: dict[str, int]
    done: list[tuple[float, int, str]]
    joins: dict[str, int]
    seconds: float
    longest_pause: float

    @property
    def ratio(self) -> float:
        return self.loss / self.calm_loss


def short(seed: int) -> Plan:
    """What the test suite has time for: fewer rounds, and a lost worker is found out sooner.

    A deed a round in the first sixteen rounds costs more than it does over sixty: the loss may be further off.
    """
    return Plan(_FEWEST_ROUNDS, seed, lost_seconds=2.0, step_seconds=0.07, every=1, most_loss=1.15)


def outcome(plan: Plan, folder: Path) -> Outcome:
    """The whole run, and the calm one beside it."""
    calm_loss, _ = calm(plan.workers, plan.rounds)
    with Workers(folder, lost_seconds=plan.lost_seconds, beat_seconds=plan.lost_seconds / 5) as workers:
        chaos = Chaos(plan, workers)
        chaos.begin()
        chaos.run()
        chronicle, sorts = chaos.chronicle, chaos.sorts
    losses = chronicle.losses(sorts.finishing)
    loss = max(losses, default=float("nan"))
    faults = [*chronicle.broken_rules(sorts), *chronicle.unfinished(sorts, plan.rounds)]
    if not loss <= plan.most_loss * calm_loss:
        faults.append(f"the loss is {loss:.4f}, the calm run's {calm_loss:.4f}")
    seconds = time.monotonic() - chaos.started
    return Outcome(
        faults, loss, calm_loss, chronicle.counts(), chaos.done, chronicle.joins(), seconds, chronicle.longest_pause()
    )


def show(told: Outcome) -> None:
    console = Console(width=max(100, Console().width))
    table = Table(title="what was done")
    for name in ("second", "after round", "deed"):
        table.add_column(name, justify="left" if name == "deed" else "right")
    for second, after, deed in told.done:
        table.add_row(f"{second:.1f}", str(after), deed)
    console.print(table)
    table = Table(title="what came of it")
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in told.counts.items():
        table.add_row(name, str(count))
    late = ", ".join(f"{life}: {missed}" for life, missed in told.joins.items())
    table.add_row("rounds that a joiner missed after it had the state", late)
    table.add_row("longest time between two rounds", f"{told.longest_pause:.1f} s")
    table.add_row("loss, calm run's, ratio", f"{told.loss:.4f}, {told.calm_loss:.4f}, {told.ratio:.4f}")
    table.add_row("seconds", f"{told.seconds:.0f}")
    console.print(table)
    for fault in told.faults:
        console.print(f"FAULT: {fault}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--short", action="store_true", help="20 rounds, and workers are lost sooner")
    parser.add_argument("--keep", type=Path, help="a folder to leave the workers' logs and stories in")
    given = parser.parse_args()
    if given.rounds < _FEWEST_ROUNDS:
        parser.error(f"--rounds {given.rounds} must be at least {_FEWEST_ROUNDS}: there is a lot to do")
    plan = short(given.seed) if given.short else Plan(given.rounds, given.seed, 5.0, 0.05)
    print(f"rounds {plan.rounds}, seed {plan.seed}")
    with tempfile.TemporaryDirectory() as folder:
        told = outcome(plan, given.keep or Path(folder))
    show(told)
    if not given.short:
        kept = {"rounds": plan.rounds, "seed": plan.seed, "loss": told.loss, "calm_loss": told.calm_loss}
        more = {"counts": told.counts, "joins": told.joins, "seconds": told.seconds, "faults": told.faults}
        print(f"written: {write_results('chaos', kept | more | {'longest_pause': told.longest_pause}).name}")
    return 1 if told.faults else 0


if __name__ == "__main__":
    sys.exit(main())
