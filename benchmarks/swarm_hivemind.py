"""The other side of benchmarks/swarm.py: Hivemind's own averaging as it is, with fp16, of the same vector.

A round is timed from the moment when the group stands (matchmaking is not counted) to the averaged vector in memory.
"""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from diloco.swarm.settings import Settings

_MATCHMAKING_SECONDS = 5.0
_ROUND_SECONDS = 120.0


@dataclass(frozen=True)
class Exchange:
    """One round as one peer saw it. `bytes_sent`: as the engine counts them; 0 where it does not."""

    seconds: float
    bytes_sent: int = 0
    digest: str = ""


def average_raw(settings: Settings, pipe: Connection, numel: int, first: list[str]) -> None:
    """Says its addresses; then for every command a round: "ready", and after another command its Exchange."""
    multiprocessing.set_start_method("fork", force=True)  # it can start its own processes in no other way
    import hivemind
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Float16Compression

    dht = hivemind.DHT(start=True, initial_peers=first, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    vector = torch.randn(numel)
    averager = hivemind.averaging.DecentralizedAverager(
        [vector],
        dht,
        start=True,
        prefix=settings.label,
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=_MATCHMAKING_SECONDS,
        request_timeout=_MATCHMAKING_SECONDS / 2,
        compression=Float16Compression(),
    )
    pipe.send((True, [str(address) for address in dht.get_visible_maddrs()]))
    while pipe.recv() is not None:
        control = averager.step(wait=False, require_trigger=True, timeout=_ROUND_SECONDS)
        while control.stage not in (AveragingStage.AWAITING_TRIGGER, AveragingStage.FINISHED):
            time.sleep(0.005)
        pipe.send((True, "ready"))
        pipe.recv()
        started = time.monotonic()
        control.allow_allreduce()
        control.result(_ROUND_SECONDS)
        with averager.get_tensors() as tensors:
            size = float(tensors[0][0])
        pipe.send((True, Exchange(time.monotonic() - started, digest=f"{size:.3f}")))
    averager.shutdown()
    dht.shutdown()
    pipe.send((True, None))
