"""The cases of benchmarks/swarm.py; each starts its own workers and leaves none behind.

What the workers do is in swarm_workers.py, but for (d), whose trainers are threads of this process.
"""

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

import search_path  # noqa: F401  `support` of the tests
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import PartLayout
from diloco.engines.rounds import Contribution, GlobalState, RoundKey
from diloco.errors import RoundFailed
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from measuring import Spread
from support.swarm.processes import Worker, Workers, descendants
from support.swarm.trainers import Round, average
from swarm_workers import Exchange, Joined, average_raw, exchange, pass_streams, train_freely

RAW = "hivemind fp16"
STREAMS = "p2pd's streams alone"
OURS = "ours "
_ROUND_SECONDS = 150.0
_WARM_UP = 3  # rounds of each case: workers keep the last eight means, in memory that is new until then
_AFTER_SECONDS = 1.0
_H = 3
_PEACEFUL_ROUNDS = 3


# (a) One round


@dataclass
class Rounds:
    """All rounds of one case."""

    case: str
    parameters: int
    seconds: list[float] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)
    """Bytes a parameter that a peer sent, as the engine says."""
    loopback: list[float] = field(default_factory=list)
    """The same at the loopback device: half of what both sent."""
    cpu: list[float] = field(default_factory=list)
    """Seconds of processor time of a peer's processes: the work, on a busy machine too."""

    def row(self, extra_bytes: int) -> dict[str, object]:
        low = min(self.loopback)  # others on this machine use the device too
        reported = max(self.reported) if any(self.reported) else None
        row = {"case": self.case, "parameters": self.parameters, "seconds": vars(Spread.of(self.seconds))}
        row["cpu_seconds"] = vars(Spread.of(self.cpu))
        return row | {"reported_bytes": reported, "loopback_bytes": low, "extra_memory_bytes": extra_bytes}


def one_round(folder: Path, parameters: int, codecs: list[str], repeats: int) -> list[dict[str, object]]:
    """Measure ours with each codec and Hivemind's in turn, so that what else the machine does falls on all alike."""
    with Workers(folder / "ours") as ours, Workers(folder / "raw") as raw, Workers(folder / "streams") as plain:
        pair = ours.start_all(["one", "two"], exchange, parameters)
        first = raw.start("raw", average_raw, parameters, [])
        second = raw.start("raw", average_raw, parameters, first.hear(120.0))
        second.hear(120.0)
        streams = _start_streams(plain, EncodedVector(codec("fp16"), PartLayout(parameters)).num_bytes)
        sides = {f"{OURS}{name}": (pair, name) for name in codecs}
        sides |= {RAW: ([first, second], "go"), STREAMS: (streams, "go")}
        rows = {case: Rounds(case, parameters) for case in sides}
        memory_before = {case: _memory(workers) for case, (workers, _) in sides.items()}
        for repeat in range(-_WARM_UP, repeats):
            for case, (workers, command) in sides.items():
                measure_round(rows[case] if repeat >= 0 else Rounds(case, parameters), workers, command)
        extra = {case: _memory(workers) - memory_before[case] for case, (workers, _) in sides.items()}
        for worker in [*pair, first, second, *streams]:
            worker.ask(None, 30.0)
    return [rows[case].row(extra[case] // 2) for case in sides]


def _start_streams(workers: Workers, num_bytes: int) -> list[Worker]:
    first = workers.start("first", pass_streams, num_bytes, None)
    address = first.hear(120.0)
    second = workers.start("second", pass_streams, num_bytes, address)
    first.say(second.hear(120.0)[0])
    second.say(address[0])
    return [first, second]


def measure_round(row: Rounds, workers: list[Worker], command: str) -> None:
    for worker in workers:
        worker.say(command)
    for worker in workers:
        worker.hear(_ROUND_SECONDS)
    time.sleep(0.1)
    loopback_before = _loopback_bytes()
    cpu_before = _cpu_seconds(workers)
    for worker in workers:
        worker.say("go")
    exchanges: list[Exchange] = [worker.hear(_ROUND_SECONDS) for worker in workers]
    loopback = _loopback_bytes() - loopback_before
    time.sleep(_AFTER_SECONDS)  # what is done beside training, such as the check of a mean, is work of this round too
    row.cpu.append((_cpu_seconds(workers) - cpu_before) / len(workers))
    row.seconds.append(max(exchange.seconds for exchange in exchanges))
    row.reported.append(max(exchange.bytes_sent for exchange in exchanges) / row.parameters)
    row.loopback.append(loopback / len(workers) / row.parameters)
    if len({exchange.digest for exchange in exchanges}) > 1 and row.case != RAW:  # its peers differ by design
        raise SystemExit(f"{row.case}: the peers have different means: {exchanges}")


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    raise RuntimeError("/proc/net/dev has no loopback device")


def _cpu_seconds(workers: list[Worker]) -> float:
    """Return the processor time of all processes of these workers so far."""
    ticks = 0
    for pid in (pid for worker in workers for pid in [worker.pid, *descendants(worker.pid)]):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(workers: list[Worker]) -> int:
    """Return the most memory that all processes beside the trainers have held so far."""
    return sum(_peak(pid) for worker in workers for pid in descendants(worker.pid))


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


# (b) Kills


@dataclass(frozen=True)
class Loss:
    """A worker that was lost, and the round that the others then ended. `extra`: seconds more than in peace."""

    deed: str
    victim: str
    workers: int
    seconds: float
    extra: float
    same: bool
    """All survivors have the same anchor, and no work but the victim's is missing."""


def _kill(victim: Worker, _: int) -> None:
    victim.kill()


def _kill_in_transfer(victim: Worker, size: int) -> None:
    victim.stop_carrying(size)
    victim.kill()


def _freeze_in_transfer(victim: Worker, size: int) -> None:
    victim.stop_carrying(size)
    victim.freeze()


DEEDS: dict[str, Callable[[Worker, int], None]] = {
    "SIGKILL between rounds": _kill,
    "SIGKILL in a transfer": _kill_in_transfer,
    "SIGSTOP in a transfer": _freeze_in_transfer,
}


def losses(folder: Path, parameters: int) -> list[Loss]:
    """Measure losses of workers with the default timeouts.

    Killed workers are lost one after another, from four until one is left. Only one freezes in each swarm, since a
    swarm of which most have fallen silent waits longer on purpose.
    """
    loss_rows = []
    for deed in DEEDS:
        for victim in ("leader", "other"):
            sizes = [(4, 1), (3, 1), (2, 1)] if "SIGSTOP" in deed else [(4, 3)]
            for size, deaths in sizes:
                case_folder = folder / f"{deed}-{victim}-{size}".replace(" ", "-")
                loss_rows += _lose(case_folder, parameters, deed, victim, size, deaths)
    return loss_rows


def _lose(folder: Path, parameters: int, deed: str, victim: str, size: int, deaths: int) -> list[Loss]:
    """Lose `deaths` of `size` workers, one after another."""
    loss_rows = []
    with Workers(folder) as all_:
        names = [f"machine-{index}" for index in range(size)]
        workers = all_.start_all(names, average, parameters, SyncConfig(_H, "fp32", timeout_seconds=120.0))
        for _ in range(deaths):
            usual_seconds = statistics.median(
                max(round_.seconds for round_ in _round(workers)) for _ in range(_PEACEFUL_ROUNDS)
            )
            lost_worker = workers.pop(0 if victim == "leader" else -1)
            if "between" in deed:
                DEEDS[deed](lost_worker, parameters)
                _begin(workers)
            else:
                _begin([*workers, lost_worker])
                DEEDS[deed](lost_worker, parameters)
            loss_rows.append(_loss(deed, victim, [worker.hear(_ROUND_SECONDS) for worker in workers], usual_seconds))
    return loss_rows


def _begin(workers: list[Worker]) -> None:
    for worker in workers:
        worker.say(True)


def _round(workers: list[Worker]) -> list[Round]:
    _begin(workers)
    return [worker.hear(_ROUND_SECONDS) for worker in workers]


def _loss(deed: str, victim: str, rounds: list[Round], usual_seconds: float) -> Loss:
    seconds = max(round_.seconds for round_ in rounds)
    ended = all(round_.failure is None for round_ in rounds)
    one_state = len({round_.digest for round_ in rounds}) == 1 and len({str(round_.weights) for round_ in rounds}) == 1
    all_work_counts = all(rounds[0].weights.get(round_.worker) == _H for round_ in rounds)
    same = ended and one_state and all_work_counts and not math.isnan(rounds[0].anchor)
    return Loss(deed, victim, len(rounds) + 1, seconds, seconds - usual_seconds, same)


# (c) Joining


@dataclass(frozen=True)
class Join:
    parameters: int
    member_seconds: float
    """From the start of the worker to its number; mostly Python's imports."""
    state_seconds: float
    """From the number to the state."""
    rounds_missed: int
    """Rounds that ended after it had the state, before the first with its work."""


def joining(folder: Path, parameters: int, joiners: int = 3) -> list[Join]:
    """Let two workers train, and others join them one after another."""
    sync = SyncConfig(10, "fp16", timeout_seconds=120.0)
    joins = []
    with Workers(folder) as all_:
        first = all_.start("first", train_freely, parameters, sync, 0.05)
        first.hear(120.0)
        second = all_.start("second", train_freely, parameters, sync, 0.05)
        second.hear(120.0)
        for index in range(joiners):
            time.sleep(3.0)
            joiner = all_.start(f"joiner-{index}", train_freely, parameters, sync, 0.05)
            joined: Joined = joiner.hear(120.0)
            had_state = time.monotonic()
            time.sleep(4.0)
            rounds: list[tuple[int, float, bool]] = joiner.ask("end", 60.0)
            first_own_round = min((sequence for sequence, _, took_part in rounds if took_part), default=-1)
            missed = [
                sequence for sequence, ended_at, _ in rounds if ended_at > had_state and sequence < first_own_round
            ]
            waited = joined.state_seconds - joined.member_seconds
            joins.append(Join(parameters, joined.member_seconds, waited, len(missed) if first_own_round >= 0 else -1))
        for worker in (first, second):
            worker.ask("end", 60.0)
    return joins


# (d) Many peers


@dataclass(frozen=True)
class Crowd:
    """The rounds of many peers."""

    peers: int
    rounds: int
    full: int
    """Rounds in which all were."""
    failed: int
    """Failed rounds, summed over the workers."""
    seconds: Spread
    """The time of a round."""


def crowd(folder: Path, peers: int, rounds: int, pause_seconds: float) -> Crowd:
    """Let many peers end rounds: real sidecars, whose trainers are threads of this process."""
    key = RunKey.create()
    engines: list[SwarmEngine] = []

    def start(index: int) -> None:
        machine = folder / f"machine-{index}" / "swarm"
        members = engines[0].status().members if engines else []
        addresses = [member.addresses[0] for member in members if member.live][:4]
        write_private(machine / invitation_file(), invite(key, addresses, 3600.0, time.time()).text())
        engine = SwarmEngine(Settings(str(machine), "worker-0", founder=index == 0, host="127.0.0.1"))
        engine.serve_state(lambda: GlobalState({"0.anchor": torch.zeros(1)}, {"sequence": 0}, "same"))
        engine.fetch_state()
        engines.append(engine)

    try:
        start(0)
        for first in range(1, peers, 3):
            _together([partial(start, index) for index in range(first, min(first + 3, peers))])
        _until_all_see_all(engines)
        return _crowd_rounds(engines, rounds, pause_seconds)
    finally:
        _together([engine.close for engine in engines])


def _until_all_see_all(engines: list[SwarmEngine]) -> None:
    end = time.monotonic() + 60.0
    while any(
        sum(member.live and member.has_state for member in engine.status().members) < len(engines) for engine in engines
    ):
        if time.monotonic() > end:
            raise SystemExit("the peers do not see each other")
        time.sleep(0.1)


def _crowd_rounds(engines: list[SwarmEngine], rounds: int, pause_seconds: float) -> Crowd:
    contributors_of_round: dict[int, list[int]] = {sequence: [] for sequence in range(rounds)}
    seconds: list[float] = []
    failed: list[str] = []
    lock = threading.Lock()

    def train(engine: SwarmEngine) -> None:
        vector = EncodedVector(codec("fp32"), PartLayout(1024))
        chance = torch.Generator().manual_seed(engine.worker)
        for sequence in range(rounds):
            time.sleep(pause_seconds * (1 + float(torch.rand(1, generator=chance))))
            vector.encode(0, torch.ones(1024))
            posted = time.monotonic()
            try:
                result = engine.start_round(
                    RoundKey(sequence, 0), Contribution(vector, 1.0, 32.0, "anchor", "same", 1000.0), 60.0
                ).wait()
                with lock:
                    contributors_of_round[sequence].append(len(result.contributors))
                    seconds.append(time.monotonic() - posted)
            except RoundFailed as failure:
                with lock:
                    failed.append(failure.reason)
                engine.fetch_state()

    _together([partial(train, engine) for engine in engines])
    full = sum(contributors == [len(engines)] * len(engines) for contributors in contributors_of_round.values())
    return Crowd(len(engines), rounds, full, len(failed), Spread.of(seconds))


def _together(work: list[Callable[[], None]]) -> None:
    """Make all calls, each in a thread; raises the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
