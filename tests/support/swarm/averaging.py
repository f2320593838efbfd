"""A worker of a swarm in a process of its own, without a model: waits for the others, averages, prints the means."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

_SECONDS = 200.0


def main(given: dict[str, Any]) -> None:
    from msgspec import convert

    from diloco.engines.rounds import GlobalState
    from diloco.swarm.engine import SwarmEngine
    from diloco.swarm.settings import Settings
    from support.rounds import average

    torch.set_num_threads(1)
    engine = SwarmEngine(convert(given["settings"], Settings))
    sequence = 0

    def state() -> GlobalState:
        return GlobalState({"anchor": torch.zeros(10)}, {"sequence": sequence, "inner_steps": 0}, "same")

    engine.serve_state(state)
    engine.next_round = lambda: sequence
    engine.fetch_state()
    deadline = time.monotonic() + _SECONDS
    while True:
        own = next(one for one in engine.status().members if one.number == engine.worker)
        if not given["relayed"] or any("/p2p-circuit" in address for address in own.addresses):
            break
        assert time.monotonic() < deadline, f"no relay has a reservation for this worker: {own}"
        time.sleep(0.05)
    print(json.dumps({"worker": engine.worker, "addresses": own.addresses}), flush=True)
    while sum(one.live and one.has_state for one in engine.status().members) < given["workers"]:
        assert time.monotonic() < deadline, f"only {engine.status()} are here"
        time.sleep(0.05)
    for sequence in range(given["rounds"]):
        result = average(engine, sequence, _SECONDS, numel=given["numel"], name="int8")
        mean = hashlib.sha256(result.mean.data.numpy().tobytes()).hexdigest()
        print(json.dumps({"contributors": result.contributors, "mean": mean, "sent": result.bytes_sent}), flush=True)
    sys.stdin.readline()  # others may still be fetching the last mean
    engine.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(json.loads(sys.argv[1]))
