"""A run that is killed again and again and resumed each time, beside one that is left alone.

A kill is SIGKILL to the launcher and all workers at once, at a random moment: while they start, while they train, while
a checkpoint is being written.
"""

import contextlib
import hashlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.records.summary import read_summary
from support.event_log import Event, read_events
from support.forks import Launch, Launched, start_interpreter

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looks", "at", "rain", "while", "small", "birds", "sing")
H = 10


@dataclass(frozen=True)
class Kill:
    """One kill, and what came of it."""

    moment: str
    at_step: int
    checkpoints: list[int]
    unfinished: int
    """Checkpoints that were being written."""


def options(folder: Path, steps: int, extra: list[str]) -> list[str]:
    text = folder / "text.txt"
    if not text.exists():
        order = random.Random(0)
        text.write_text("\n".join(" ".join(order.choices(WORDS, k=9)) for _ in range(3000)))
    return [
        *(f"--data.source={text}", f"--data.cache_dir={folder / 'cache'}", "--data.vocab_size=300"),
        *("--data.sequence_length=16", "--data.shards=4", "--training.batch_size=8", "--training.eval_windows=16"),
        *("--training.log_interval=1", "--training.sample_tokens=5", "--inner.warmup_steps=4", "--device=cpu"),
        *("--threads=1", f"--steps={steps}", f"--H={H}", f"--checkpoint.interval={H}", *extra),
    ]


def kill_all(process: Launched) -> None:
    """The launcher and everything it started, all processes of its session; returns when none of them runs any more."""
    deadline = time.monotonic() + 60.0
    while running := _running(process.pid):
        if time.monotonic() > deadline:
            raise SystemExit(f"the processes {running} do not end after SIGKILL")
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _running(session: int) -> list[int]:
    """The processes of a session that have not exited."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            after_name = path.read_text().rpartition(")")[2].split()
            if int(after_name[3]) == session and after_name[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def steps_of(events: list[Event]) -> list[int]:
    return [event["step"] for event in events if event["type"] == "step" and event["worker"] == 0]


def wait_for(process: Launched, run: Path, new_steps: int, seconds: float = float("inf")) -> None:
    """Until worker 0 has taken so many steps since now, or so many seconds are over, or the run has ended."""
    before, deadline = len(steps_of(read_events(run))), time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if len(steps_of(read_events(run))) >= before + new_steps:
            return
        time.sleep(0.02)


def kill_once(process: Launched, run: Path, chance: random.Random, most_steps: int) -> Kill | None:
    """Wait for a random moment, then kill; None if the run ended before."""
    if chance.random() < 0.2:
        moment = "while starting"
        wait_for(process, run, 1, chance.uniform(0.0, 5.0))
    else:
        moment = "while training"
        wait_for(process, run, chance.randint(1, most_steps))
        time.sleep(chance.uniform(0.0, 0.05))
    if process.poll() is not None:
        return None
    kill_all(process)
    steps = steps_of(read_events(run))
    complete, _ = find_checkpoints(run)
    files = list((run / "checkpoints").glob("step-*/worker-*/*.safetensors"))
    return Kill(moment, steps[-1] if steps else 0, sorted({c.step for c in complete}), len(files) - len(complete))


def outcome(run: Path) -> tuple[list[str], str]:
    """The digests of the anchors, and of the exported weights."""
    weights = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]
    return read_summary(run)["anchor_digests"], weights


def trial(
    folder: Path, kills: int, seed: int, extra: list[str], launch: Launch = start_interpreter
) -> tuple[list[Kill], bool]:
    """The kills, and whether the killed run ended with the bits of the other one."""
    steps = kills * 10 * H  # more than all kills together can let pass
    log, chance = folder / "log.txt", random.Random(seed)
    arguments = options(folder, steps, extra)
    whole, killed = folder / "whole", folder / "killed"

    def start(*more: str) -> Launched:
        return launch(["train", *more], dict(os.environ), log, log)

    if start(*arguments, f"--out={whole}").wait():
        raise SystemExit(f"the run in peace failed:\n{log.read_text()}")
    process = start(*arguments, f"--out={killed}")
    while not (killed / "config.toml").exists() and process.poll() is None:  # before that there is no run to resume
        time.sleep(0.02)
    done: list[Kill] = []
    while len(done) < kills:
        kill = kill_once(process, killed, chance, 3 * H)
        if kill is None:
            break
        done.append(kill)
        process = start(f"--resume={killed}")
    if process.wait():
        raise SystemExit(f"the resumed run failed:\n{log.read_text()[-5000:]}")
    return done, outcome(whole) == outcome(killed)
