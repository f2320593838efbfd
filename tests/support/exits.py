"""Processes that train a few rounds together over gloo, and then end their interpreter in one of the usual ways.

An interpreter that ends while a gloo thread still needs it is aborted (SIGABRT). Every process here is a fork of one
that has imported torch, and ends as a script does: by running out of lines, never by `os._exit`.
"""

import atexit
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # otherwise every fork imports it with its first optimizer: seconds
import torch.distributed as dist

from diloco.core.config import SyncConfig
from diloco.engines import torch_distributed
from diloco.engines.base import Connection
from diloco.engines.connect import connect
from diloco.optimizer import DiLoCo

SECONDS = 120.0
LEFT = "gloo threads at exit:"


@dataclass(frozen=True)
class Way:
    """One way to leave, by so many processes, and the exit code of each."""

    leave: Callable[[], None]
    codes: tuple[int, ...] = (0, 0)


def run_processes(way: Way) -> tuple[list[int], str]:
    """The exit codes of one set of processes (a signal's number, negative, where one ended it) and what they wrote.

    The calling process must have one thread only: torch's are not there in a fork.
    """
    store, port = _start_store()
    folder = tempfile.mkdtemp()
    count = len(way.codes)
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:  # no `with` and no `finally` around it: a fork's end would end what is its parent's
            _run(way, rank, count, port, Path(folder, f"{rank}.log"))
        pids.append(pid)
    try:
        return [_wait(pid) for pid in pids], "\n".join(path.read_text() for path in sorted(Path(folder).iterdir()))
    finally:
        _kill(store)
        shutil.rmtree(folder)


def _run(way: Way, rank: int, count: int, port: int, log: Path) -> NoReturn:
    """Be a worker that torchrun has started."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    atexit.register(_write_threads)  # the first registered is the last to run
    way.leave()
    sys.exit()


def _write_threads() -> None:
    names = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
    print(f"{LEFT} {sorted(name for name in names if 'gloo' in name)}", flush=True)


def _start_store() -> tuple[int, int]:
    """The pid and the port of a TCPStore in a process of its own, as torchrun's agent is."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.write(send, str(store.port).encode())
        signal.pause()
    port = int(os.read(receive, 16))
    os.close(receive)
    os.close(send)
    return pid, port


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    _kill(pid)
    raise AssertionError(f"a process did not end within {SECONDS:g} s")


# What a process does


def _train(engine: Connection, overlap_steps: int = 0, late_seconds: float = 0.0) -> DiLoCo:
    """Two rounds, the last of which is on its way if there is overlap; worker 0 may be late for that one."""
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = SyncConfig(num_inner_steps=2, overlap_steps=overlap_steps, timeout_seconds=60.0)
    optimizer = DiLoCo(model, inner, engine, sync=sync)
    for step in range(4):
        if step == 3 and engine.worker == 0:
            time.sleep(late_seconds)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _finish() -> None:
    _train(connect()).finish()


def _close() -> None:
    with connect() as engine:
        _train(engine).finish()


def _forgotten() -> None:
    """A round is on its way, and no finish() merges it."""
    _train(connect(), overlap_steps=1)


def _island() -> None:
    _train(connect(island=True)).finish()


def _ranks() -> None:
    _train(connect(ranks_per_worker=(1, 2))).finish()


def _error() -> None:
    _optimizer = _train(connect(), overlap_steps=1)
    raise ValueError("the loop is wrong")


def _error_of_ranks() -> None:
    _optimizer = _train(connect(ranks_per_worker=(1, 2)), overlap_steps=1)
    raise ValueError("the loop is wrong")


def _lost_peer() -> None:
    engine = connect()
    _train(engine)
    if engine.worker == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _train(engine)


def _late_peer() -> None:
    """Worker 1 fails and is gone before worker 0 comes to the round that worker 1 has begun."""
    torch_distributed._CLOSE_SECONDS = 0.1
    _optimizer = _train(connect(), overlap_steps=1, late_seconds=2.0)
    raise ValueError("the loop is wrong")


WAYS = {
    "finish": Way(_finish),
    "close": Way(_close),
    "island": Way(_island),
    "ranks": Way(_ranks, (0, 0, 0)),
    "error": Way(_error, (1, 1)),
    "finish forgotten": Way(_forgotten),
    "error of ranks": Way(_error_of_ranks, (1, 1, 1)),
    "lost peer": Way(_lost_peer, (-signal.SIGKILL, 1)),
    "late peer": Way(_late_peer, (1, 1)),
}

if __name__ == "__main__":  # each way once; prints what each has left behind
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # otherwise every fork visits all of torch's objects at its end: a second of CPU time
    for name, way in WAYS.items():
        codes, text = run_processes(way)
        print(json.dumps({"way": name, "codes": codes, "expected": way.codes, "text": text}), flush=True)
