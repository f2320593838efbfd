"""The rounds of benchmarks/checking.py: real workers of a swarm, with their checks and without them, in turn."""

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import search_path  # noqa: F401  `support` of the tests
from attacks.unchecked import CHECKS_OFF, leave_checks_out
from diloco.swarm.settings import Settings
from measuring import Spread
from support.swarm.networks import internet
from support.swarm.processes import Worker, Workers
from swarm_cases import Rounds, measure_round
from swarm_workers import exchange

_WARM_UP = 2
_PATCHED = Path(__file__).parent / "attacks" / "patched"


@dataclass(frozen=True)
class Checked:
    """Rounds of one codec. Seconds are of the slower worker, from the outer gradient to the decoded mean."""

    codec: str
    workers: int
    elements: int
    seconds: Spread
    seconds_without: Spread
    cpu_seconds: Spread
    """Processor time of a worker's processes, until the mean is checked."""
    cpu_seconds_without: Spread
    bytes_sent: float
    """Bytes that a worker sent, as the engine counts: parts and means."""

    def share(self, inner_seconds: float = 0.0) -> float:
        """Return the share of a round's time, with so many seconds of inner steps, by which the checks delay it."""
        delay = self.seconds.median - self.seconds_without.median
        return delay / (self.seconds.median + inner_seconds)


def switchable(settings: Settings, pipe: Connection, elements: int, off: str) -> None:
    """Run a worker whose network process leaves checks out while the file `off` is there."""
    os.environ |= {"ATTACK": leave_checks_out.__name__, CHECKS_OFF: off}
    sys.path.insert(0, str(_PATCHED))  # a network process has the path of its trainer
    exchange(settings, pipe, elements)


def checked_rounds(
    folder: Path, elements: int, workers: int, codecs: list[str], repeats: int, mbits: int | None
) -> list[Checked]:
    """Measure each codec with and without checks in turn, so that what else the machine does falls on both alike.

    `mbits`: the rate of each worker's line in both directions, which needs root; None: the loopback device.
    """
    names = [f"worker-{index}" for index in range(workers)]
    with ExitStack() as stack:
        net = None if mbits is None else stack.enter_context(internet())
        all_ = stack.enter_context(Workers(folder / "workers", net))
        started = all_.start_all(names, switchable, elements, str(folder / "off"))
        if net is not None:
            for name in names:
                net.limit(name, f"{mbits}mbit")
        rows = _measure(started, folder / "off", elements, codecs, repeats)
        for worker in started:
            worker.ask(None, 30.0)
    return [_compare(rows[name, False], rows[name, True], workers) for name in codecs]


def _measure(
    workers: list[Worker], off: Path, elements: int, codecs: list[str], repeats: int
) -> dict[tuple[str, bool], Rounds]:
    """Measure the rounds, by codec and whether checks were left out."""
    cases = [(name, without) for name in codecs for without in (False, True)]
    rows = {case: Rounds(case[0], elements) for case in cases}
    for repeat in range(-_WARM_UP, repeats):
        for name, without in cases if repeat % 2 else reversed(cases):
            if without:
                off.touch()
            measure_round(rows[name, without] if repeat >= 0 else Rounds(name, elements), workers, name)
            off.unlink(missing_ok=True)
    return rows


def _compare(checked: Rounds, without: Rounds, workers: int) -> Checked:
    return Checked(
        codec=checked.case,
        workers=workers,
        elements=checked.parameters,
        seconds=Spread.of(checked.seconds),
        seconds_without=Spread.of(without.seconds),
        cpu_seconds=Spread.of(checked.cpu),
        cpu_seconds_without=Spread.of(without.cpu),
        bytes_sent=max(checked.reported) * checked.parameters,
    )
