"""What faults cost in throughput: workers train while some of them die and come back or sleep, and the same in peace.

    python benchmarks/long_run.py --workers 16 --minutes 6

Workers are real ones, each a trainer, a sidecar and a p2pd on this machine; their inner steps take a fixed time, so
that the machine's cores do not decide. Two of three faults are a SIGKILL of all that runs of one worker, which is
started again at once; the third stops it for longer than a worker may be silent. Rounds are merged `--overlap` steps
after they were posted. Throughput is the tokens behind the work that is in the anchor, a minute: the weights of all
means, from the end of a round to the end of a round. What others publish: 62 faults in 30 minutes, 32 replicas, 97.7 %
of the throughput.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import search_path  # noqa: F401  `support` of the tests
from measuring import write_results
from support.chaos.story import Chronicle, Lives
from support.chaos.worker import BATCH, LENGTH, H, Task, train
from support.swarm.processes import Worker, Workers

_RATE = 62 / 30
_ENDLESS = 100_000
_START_SECONDS = 300.0
_HANG_SECONDS = 60.0
_POLL_SECONDS = 0.5
_LOST_SECONDS = 5.0


@dataclass
class Life:
    """One process of a machine."""

    name: str
    machine: str
    worker: Worker
    thaws_at: float | None = None


@dataclass
class Run:
    workers: Workers
    seed: int
    step_seconds: float
    overlap: int
    lives: list[Life] = field(default_factory=list)
    kills: int = 0
    sleeps: int = 0
    away_seconds: float = 0.0
    """Time away, summed over the machines: from a kill until its next process trains, and asleep."""
    away_since: dict[str, float] = field(default_factory=dict)
    """Machines that were killed and do not train yet."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._chronicle = Chronicle([])

    @property
    def chronicle(self) -> Chronicle:
        self._chronicle.read([self.workers.folder / f"{life.name}.jsonl" for life in self.lives])
        return self._chronicle

    def start(self, machine: str) -> Worker:
        name = f"{machine}.{sum(life.machine == machine for life in self.lives)}"
        story = self.workers.folder / f"{name}.jsonl"
        task = Task(_ENDLESS, story, name, self.step_seconds, overlap_steps=self.overlap)
        life = Life(name, machine, self.workers.start(machine, train, task))
        self.lives.append(life)
        return life.worker

    def begin(self, count: int) -> None:
        """Start all workers, and wait until a round has had the work of all."""
        self.start("machine-0").hear(_START_SECONDS)
        for worker in [self.start(f"machine-{index}") for index in range(1, count)]:
            worker.hear(_START_SECONDS)
        for life in self.lives:
            life.worker.say("go")
        end = time.monotonic() + _START_SECONDS
        while max(self.chronicle.contributions().values(), default=0) < count:
            if time.monotonic() > end:
                raise SystemExit(f"no round had the work of all {count} within {_START_SECONDS:g} s")
            time.sleep(1.0)

    # Faults

    def hurt(self) -> str:
        """Hurt a machine that trains, unless half of them are away."""
        begun = {line["life"] for line in self.chronicle.of("start")}
        training_lives = [
            life for life in self.lives if life.worker.alive and life.name in begun and life.thaws_at is None
        ]
        if 2 * len(training_lives) <= len({life.machine for life in self.lives}):
            return "(none: half of the machines are away)"
        victim = self.chance.choice(training_lives)
        now = time.monotonic()
        if (self.kills + self.sleeps) % 3 == 2:
            seconds = _LOST_SECONDS * self.chance.uniform(1.2, 2.0)
            victim.worker.freeze()
            victim.thaws_at = now + seconds
            self.sleeps += 1
            self.away_seconds += seconds
            return f"{victim.name} sleeps for {seconds:.1f} s"
        victim.worker.kill()
        self.kills += 1
        self.away_since[victim.machine] = now
        self.start(victim.machine).say("go")
        return f"{victim.name} is killed"

    def look_after(self, chronicle: Chronicle) -> None:
        now = time.monotonic()
        for life in self.lives:
            if life.thaws_at is not None and now > life.thaws_at:
                life.worker.thaw()
                life.thaws_at = None
        latest = {life.machine: life.name for life in self.lives}
        begun = {line["life"]: line["time"] for line in chronicle.of("start")}
        for machine in [machine for machine in self.away_since if latest[machine] in begun]:
            self.away_seconds += begun[latest[machine]] - self.away_since.pop(machine)

    def watch(self, seconds: float, rate: float) -> float:
        """Measure the tokens a minute in the anchor, with `rate` faults a minute, until the first round that ends after
        `seconds`."""
        first = list(self.chronicle.ends().values())[-1]
        started = first["time"]
        faults = round(seconds / 60.0 * rate)
        times = [started + seconds / faults * (index + self.chance.random()) for index in range(faults)]
        while (last := self.chronicle.ends().popitem()[1])["time"] < started + seconds:
            now = time.monotonic()
            if times and now > times[0]:
                times.pop(0)
                print(f"{now - started:7.1f} s: {self.hurt()}", flush=True)
            self.look_after(self.chronicle)
            if now - last["time"] > _HANG_SECONDS:
                raise SystemExit(f"hang: no round has ended for {_HANG_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        self.away_seconds += sum(last["time"] - since for since in self.away_since.values())
        ends = self.chronicle.ends().items()
        weight = sum(line["total"] for number, line in ends if first["round"] < number <= last["round"])
        return float(weight * BATCH * LENGTH / (last["time"] - started) * 60.0)


@dataclass(frozen=True)
class Measured:
    tokens_a_minute: float
    there: float
    """The share of the time that the workers were there, neither killed nor asleep."""
    rounds: int
    longest_pause: float
    kills: int
    sleeps: int
    broken: list[str]


def measure(options: argparse.Namespace, folder: Path, rate: float) -> Measured:
    """Measure one run, with `rate` faults a minute; 0: in peace."""
    with Workers(folder, lost_seconds=_LOST_SECONDS, beat_seconds=_LOST_SECONDS / 5) as workers:
        run = Run(workers, options.seed, options.step_seconds, options.overlap)
        run.begin(options.workers)
        tokens = run.watch(60.0 * (options.minutes if rate else options.calm_minutes), rate)
        chronicle = run.chronicle
    # With overlap a worker's story has its work as it is at the merge.
    overlapped = frozenset(life.name for life in run.lives if options.overlap)
    broken = chronicle.broken_rules(Lives(frozenset(), frozenset(), greedy=overlapped))
    present_share = 1.0 - run.away_seconds / (60.0 * options.minutes * options.workers)
    return Measured(
        tokens, present_share, chronicle.ended() + 1, chronicle.longest_pause(), run.kills, run.sleeps, broken
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=6.0, help="of the run with faults")
    parser.add_argument(
        "--calm-minutes", type=float, default=2.0, help="of the run in peace, in which rounds are alike"
    )
    parser.add_argument("--rate", type=float, default=_RATE, help="faults a minute (2.07)")
    parser.add_argument("--step-seconds", type=float, default=0.5, help="of an inner step; ten are a round")
    parser.add_argument("--overlap", type=int, default=8, help="inner steps between the post of a round and its merge")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.workers < 4 or not 0 <= options.overlap < H or options.rate <= 0:
        parser.error(f"at least 4 --workers, an --overlap of 0 to {H - 1} steps and a --rate above 0")
    with tempfile.TemporaryDirectory() as folder:
        calm = measure(options, Path(folder) / "calm", 0.0)
        print(f"in peace: {calm}", flush=True)
        hurt = measure(options, Path(folder) / "faults", options.rate)
        print(f"with faults: {hurt}")
    ratio = hurt.tokens_a_minute / calm.tokens_a_minute
    share_of_most = hurt.tokens_a_minute / (options.workers * BATCH * LENGTH * 60.0 / options.step_seconds)
    print(
        f"{options.workers} workers, {hurt.kills} kills and {hurt.sleeps} sleeps in {options.minutes:g} minutes: "
        f"{100 * ratio:.1f} % of the calm run's throughput, {100 * share_of_most:.1f} % of what steps without a pause "
        f"would give; the workers were there {100 * hurt.there:.1f} % of the time"
    )
    results = vars(options) | {"calm": asdict(calm), "faults": asdict(hurt), "ratio": ratio, "of_most": share_of_most}
    print(f"written: {write_results('long-run', results).name}")
    return 1 if calm.broken or hurt.broken else 0


if __name__ == "__main__":
    sys.exit(main())
