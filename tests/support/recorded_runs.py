"""Run folders with events as a run of two workers writes them, without a run."""

import json
from pathlib import Path
from typing import Any

from diloco.history.log import EVENTS_FILE
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.records.summary import write_summary
from support.event_log import Event

CONFIG = RunConfig(steps=40, seed=7)


def event(type_: str, worker: int = 0, **fields: Any) -> Event:
    return {"v": 1, "time": 1000.0 + fields.get("step", 0), "worker": worker, "type": type_, **fields}


def started(worker: int) -> Event:
    shape = {"parameters": 1000, "threads": 1, "tokens_per_step": 100, "unigram_perplexity": 321.0}
    return event("worker_started", worker, workers=2, device="cpu", **shape)


def step(worker: int, number: int, loss: float | None) -> Event:
    seconds = {"elapsed_seconds": number / 10, "sync_seconds": number / 40}
    amounts = {"tokens": number * 100, "rounds": number // 10, "bytes_sent": number * 5}
    return event("step", worker, step=number, loss=loss, learning_rate=0.5, gradient_norm=None, **amounts, **seconds)


def member(worker: int, steps: int, loss: float | None) -> dict[str, Any]:
    report = {"inner_steps": steps, "tokens": steps * 100, "loss": loss, "bytes_sent": 9, "sync_seconds": 0.0}
    report["elapsed_seconds"] = 1.0
    return {"worker": worker, "anchor_digest": "0" * 16, "weight": 1.0, "norm": 1.0, "report": report}


def merged(worker: int, sequence: int, number: int, **more: Any) -> Event:
    norms = {"norm": 2.0 + worker, "mean_norm": 0.5, "similarity": 0.25}
    amounts = {"waited_seconds": 0.125, "seconds": 1.5, "bytes_sent": 64}
    who = {"contributors": [0, 1], "refused": {}, "members": [member(0, number, 4.0), member(1, number, 5.0)]}
    fields = {"fragment": 0, "failure": None, **norms, **amounts, **who}
    return event("round", worker, sequence=sequence, step=number, **(fields | more))


def validation(number: int, loss: float | None) -> Event:
    return event("validation", step=number, loss=loss, perplexity=None if loss is None else 2.0**loss, tokens=64)


RUN = [
    *(started(0), started(1), validation(0, 6.0)),
    *(step(0, 10, 4.0), step(1, 10, 5.0), merged(0, 0, 10), merged(1, 0, 10), validation(10, 3.0)),
    *(step(0, 20, 3.0), step(1, 20, 3.5), merged(0, 1, 20), merged(1, 1, 20)),
]
RESUMED = [
    *(started(0), started(1)),  # from the checkpoint at step 10
    *(step(0, 20, 2.5), step(1, 20, 2.75), merged(0, 1, 20), merged(1, 1, 20), step(0, 30, 2.0), step(1, 30, 2.0)),
]


def append(folder: Path, events: list[Event]) -> None:
    with (folder / EVENTS_FILE).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)


def run_folder(folder: Path, events: list[Event], *, ended: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(CONFIG))
    append(folder, events)
    if ended:
        write_summary(folder, CONFIG, "a test has no workers")
    return folder
