"""Runs of benchmarks/adversary_real.py: members by the real commands, on this machine, and what their logs say."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import search_path  # noqa: F401  `support` of the tests
from diloco.history.events import event_fields
from diloco.history.log import read_events
from diloco.swarm.trust import run_owner
from support.swarm.networks import Internet
from support.swarm.processes import descendants

Line = dict[str, Any]
"""The fields of an event by name."""

PATCHED = Path(__file__).parent / "attacks" / "patched"
LONGEST_SECONDS = 400.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Size:
    """The size of a run: a small language model, and rounds long enough that a slow one shows."""

    rounds: int = 12
    steps_a_round: int = 30
    batch: int = 16
    lost_seconds: float = 2.0
    attack_from: int = 3
    """The first round with an attack; all before are calm."""
    long_rounds: int = 8
    long_times: float = 5.0
    """A long round takes so many times `lost_seconds`, by the speed of the calm run."""

    def longer(self, calm: "Figures") -> "Size":
        """Return the size of a run whose rounds are long beside `lost_seconds`, as those of real runs are."""
        steps = round(self.steps_a_round * self.long_times * self.lost_seconds / calm.round_seconds)
        return replace(self, rounds=self.long_rounds, steps_a_round=max(steps, self.steps_a_round))

    def options(self, cache: Path) -> list[str]:
        return [
            *("--engine=swarm", f"--steps={self.rounds * self.steps_a_round}", f"--H={self.steps_a_round}"),
            *("--data.source=stdlib", "--data.max_bytes=3000000", "--data.vocab_size=512", "--data.shards=5"),
            *("--data.sequence_length=64", f"--data.cache_dir={cache}", f"--training.batch_size={self.batch}"),
            *("--model=tiny", "--model.hidden_size=64", "--model.num_layers=2", "--model.num_heads=2"),
            *("--inner.warmup_steps=20", "--training.eval_windows=256", "--training.sample_tokens=0"),
            *(f"--training.eval_interval={self.rounds * self.steps_a_round}", "--checkpoint.interval=0"),
            f"--swarm.lost_seconds={self.lost_seconds}",
        ]


class Member:
    """One `diloco train` or `diloco join`."""

    def __init__(
        self, folder: Path, arguments: list[str], attack: str, inside: Callable[[list[str]], list[str]], **more: str
    ) -> None:
        """`inside` wraps a command line so that it runs on this member's machine. `more`: environment variables."""
        self.folder = folder
        self.bad = bool(attack)
        self.away = False
        """It is asleep or cut off for a while: the times of its rounds are not the others'."""
        environment = os.environ | more | {"COLUMNS": "300", "OMP_NUM_THREADS": "1"}
        if attack:
            environment |= {
                "ATTACK": attack,
                "PYTHONPATH": os.pathsep.join([str(PATCHED), os.environ.get("PYTHONPATH", "")]),
            }
        self._output = folder.with_suffix(".txt")
        outputs = [f"--out={folder}", "--threads=1", "--device=cpu"]
        with self._output.open("w") as output:
            command = inside(
                [sys.executable, "-m", "diloco", *arguments, *([] if "--resume" in arguments else outputs)]
            )
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    @property
    def code(self) -> int | None:
        """The member's exit code, once it has ended."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def events(self) -> list[Line]:
        with suppress(FileNotFoundError):
            events = read_events(self.folder)
            return [
                event_fields(event) | {"type": event.type, "time": event.time, "worker": event.worker}
                for event in events
            ]
        return []

    def of(self, *kinds: str) -> list[Line]:
        return [event for event in self.events if event["type"] in kinds]

    @property
    def peer(self) -> str:
        return next((str(event["peer"]) for event in self.of("swarm")), "?")

    @property
    def number(self) -> int:
        return next((int(event["worker"]) for event in reversed(self.of("round", "swarm"))), -1)

    @property
    def ended(self) -> int:
        """The last round that the member has ended."""
        return max((int(event["sequence"]) for event in self.rounds), default=-1)

    @property
    def rounds(self) -> list[Line]:
        return [event for event in self.of("round") if event["failure"] is None]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command, its worker, sidecar and p2pd."""
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        if self.code is None:
            self.signal(signal.SIGKILL)
        self._process.wait()


@dataclass
class Swarm:
    """Five members; the fifth is the bad one, or the one with the fault."""

    folder: Path
    size: Size
    cache: Path
    members: list[Member] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    net: Internet | None = None
    """With it each member has a machine of its own, m0, m1, …, and an address there."""
    places: list[str] = field(default_factory=list)

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *exception: object) -> None:
        for member in self.members:
            member.kill()

    def found(self, *options: str, attack: str = "", min_workers: int = 5) -> Member:
        option_names = {option.partition("=")[0] for option in options}
        defaults = [option for option in self.size.options(self.cache) if option.partition("=")[0] not in option_names]
        arguments = [*defaults, f"--swarm.min_workers={min_workers}", *options]
        return self._start("founder", ["train", *arguments], attack)

    def join(self, name: str, word: str = "", attack: str = "") -> Member:
        return self._start(name, ["join", f"@{self._word(name, word)}", f"--data.cache_dir={self.cache}"], attack)

    def _word(self, name: str, word: str) -> Path:
        path = self.folder / f"{name}.word"
        path.write_text(word or self.invitation())
        return path

    def resume(self, name: str, original: Member) -> Member:
        """Start a second process with the identity of a member, from a copy of its run folder."""
        shutil.copytree(original.folder, self.folder / name)
        return self._start(name, ["train", "--resume", str(self.folder / name)], "")

    def _start(self, name: str, arguments: list[str], attack: str) -> Member:
        first_round = {"ATTACK_FROM": str(self.size.attack_from)}
        inside = self._machine() if "--resume" not in arguments else list
        host = [] if "--resume" in arguments else [f"--host={self.places[-1] if self.net else '127.0.0.1'}"]
        member = Member(self.folder / name, [*arguments, *host], attack, inside, **self.environment, **first_round)
        self.members.append(member)
        return member

    def _machine(self) -> Callable[[list[str]], list[str]]:
        """Make a machine for a new member if each has its own. Returns a function that wraps a command line so that it
        runs there."""
        if self.net is None:
            return list
        name = f"m{len(self.members)}"
        self.places.append(self.net.public(name))
        return partial(self.net.inside, name)

    def invitation(self, known_by: int = 0) -> str:
        """Return a new invitation of the founder's, with the addresses that the member number `known_by` knows."""
        self.wait(lambda: _has_begun(self.members[0]))
        invitation = run_owner.new_invitations(self.members[0].folder / "swarm", 1.0, time.time())[0]
        return run_owner.renewed(self.members[known_by].folder / "swarm", invitation).text()

    def wait(self, happened: Callable[[], Any], seconds: float = LONGEST_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError(f"it has not ended within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def wait_for_round(self, sequence: int, member: Member) -> None:
        self.wait(lambda: member.ended >= sequence or member.code is not None)


def _has_begun(member: Member) -> bool:
    return "the swarm starts here" in member.output


@dataclass(frozen=True)
class Figures:
    """What the logs of the honest members say of a run."""

    rounds: int
    """Rounds that have ended for all honest members."""
    round_seconds: float
    """The median time between two rounds, from the first round with an attack on."""
    longest_seconds: float
    digests_equal: bool
    loss: float
    named_after: int | None
    """Rounds from the first with an attack until an honest member named the bad one."""
    named_as: str
    out_after: int | None
    """Rounds until it was in no later one."""
    banned_after: int | None
    """Rounds until all honest members had banned it."""
    disagreeing: int
    """Rounds in which an honest member's events name the bad one as disagreeing."""
    honest_banned: tuple[str, ...]
    failed_rounds: int
    codes: tuple[int | None, ...]
    """Exit codes of the honest members."""


def figures(honest: list[Member], bad: Member | None, size: Size) -> Figures:
    ends: dict[int, float] = {}
    digests: dict[int, set[str]] = {}
    numbers = {member.number for member in honest}
    for member in honest:
        for event in member.rounds:
            sequence = int(event["sequence"])
            if not member.away:
                ends[sequence] = max(ends.get(sequence, 0.0), float(event["time"]))
            counted = numbers & set(event["contributors"])  # a member that has missed rounds may tell of older anchors
            anchor_digests = {entry["anchor_digest"] for entry in event["members"] if entry["worker"] in counted}
            digests.setdefault(sequence, set()).update(anchor_digests)
    attacked = [sequence for sequence in sorted(ends) if sequence >= size.attack_from]
    gaps = [ends[sequence] - ends[sequence - 1] for sequence in attacked if sequence - 1 in ends]
    last = {str(event["anchor_digest"]) for member in honest for event in member.of("worker_finished")}
    losses = [float(member.of("validation")[-1]["loss"]) for member in honest if member.of("validation")]
    named_round, named_as = _named(honest, bad, ends)
    contributed = [
        int(event["sequence"])
        for member in honest
        for event in member.rounds
        if bad is not None and bad.number in event["contributors"]
    ]
    last_mean = max(
        (int(event["sequence"]) for member in honest for event in member.rounds if event["contributors"]), default=-1
    )
    out = None
    if bad is not None and bad.number not in numbers and max(contributed, default=-1) < last_mean:
        out = max(0, max(contributed, default=-1) - size.attack_from + 1)
    bans = [event for member in honest for event in member.of("member_banned")]
    honest_peers = {member.peer for member in honest}
    return Figures(
        rounds=min((len(member.rounds) for member in honest), default=0),
        round_seconds=median(gaps) if gaps else float("nan"),
        longest_seconds=max(gaps, default=float("nan")),
        digests_equal=len(last) == 1 and all(len(anchor_digests) <= 1 for anchor_digests in digests.values()),
        loss=max(losses, default=float("nan")),
        named_after=None if named_round is None else max(0, named_round - size.attack_from + 1),
        named_as=named_as,
        out_after=out,
        banned_after=_banned(honest, bad, ends, size),
        disagreeing=max(sum(_disagrees(event, bad) for event in member.rounds) for member in honest),
        honest_banned=tuple(sorted({str(event["reason"]) for event in bans if event["peer"] in honest_peers})),
        failed_rounds=sum(event["failure"] is not None for member in honest for event in member.of("round")),
        codes=tuple(member.code for member in honest),
    )


def _named(honest: list[Member], bad: Member | None, ends: dict[int, float]) -> tuple[int | None, str]:
    """Find the round in which an honest member first named the bad one, and the reason that it gave."""
    namings: list[tuple[float, str]] = []
    for member in honest if bad is not None else []:
        assert bad is not None
        number = str(bad.number)
        for event in member.events:
            event_type = str(event["type"])
            when = float(event["time"])
            if event_type in ("member_banned", "leader_passed_over", "state_refused") and event["peer"] == bad.peer:
                namings.append((when, f"{event_type}: {event.get('reason', '')}"))
            reasons_by_kind = (
                {key: event.get(key) or {} for key in ("refused", "clipped")} if event_type == "round" else {}
            )
            namings += [
                (when, f"{key}: {reasons[number]}") for key, reasons in reasons_by_kind.items() if number in reasons
            ]
    if not namings:
        return None, ""
    when, reason = min(namings)
    return _round_at(ends, when), reason


def _disagrees(event: Line, bad: Member | None) -> bool:
    return bad is not None and bad.number in (event.get("disagreeing") or ())


def _banned(honest: list[Member], bad: Member | None, ends: dict[int, float], size: Size) -> int | None:
    bans = [
        [float(event["time"]) for event in member.of("member_banned") if bad and event["peer"] == bad.peer]
        for member in honest
    ]
    if not all(bans):
        return None
    return max(0, _round_at(ends, max(map(min, bans))) - size.attack_from + 1)


def _round_at(ends: dict[int, float], when: float) -> int:
    """Return the last round that had ended, or was ending, at this moment."""
    return max((sequence for sequence, end in ends.items() if end <= when + 0.5), default=-1)
