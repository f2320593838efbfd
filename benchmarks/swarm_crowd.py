"""Many peers in one swarm, for benchmarks/swarm.py: real sidecars; the trainers are threads of one process."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.rounds import Contribution, GlobalState, RoundKey
from diloco.errors import RoundFailed
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from measuring import Spread


@dataclass(frozen=True)
class Crowd:
    peers: int
    rounds: int
    full: int
    """Rounds in which all were."""
    failed: int
    """Of all workers' rounds."""
    seconds: Spread
    """A round."""


def crowd(folder: Path, peers: int, rounds: int, pause_seconds: float) -> Crowd:
    """Real sidecars; the trainers are threads of this process."""
    key, engines = RunKey.create(), list[SwarmEngine]()

    def start(index: int) -> None:
        machine = folder / f"machine-{index}" / "swarm"
        known_addresses = (
            [member.addresses[0] for member in engines[0].status().members if member.live] if engines else []
        )
        write_private(machine / invitation_file(), invite(key, known_addresses[:4], 3600.0, time.time()).text())
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
    seconds, failed, lock = list[float](), list[str](), threading.Lock()

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
    """Each in a thread; raises the first one's error."""
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
