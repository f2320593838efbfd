"""Run folders for the dashboard's tests: a log of events as training writes it, made of arithmetic."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START = 1_700_000_000.0
TOKENS_PER_STEP = 512
PARAMETERS = 1_000_000

Event = dict[str, Any]


def event(type_: str, after: float, worker: int = 0, **fields: object) -> Event:
    return {"v": 1, "time": START + after, "worker": worker, "type": type_, **fields}


def started(worker: int, workers: int, after: float = 0.0) -> Event:
    return event(
        "worker_started", after, worker, workers=workers, ranks=1, device="cpu", precision="fp32", threads=1,
        parameters=PARAMETERS, tokens_per_step=TOKENS_PER_STEP, unigram_perplexity=500.0,
        resolved={"steps": 400, "model.name": "tiny", "sync.codec": "fp16"},
    )  # fmt: skip


def step(worker: int, number: int, loss: float | None = None, interval: int = 10) -> Event:
    """As training writes it: before the round that is due at this step."""
    loss = 7.0 * math.exp(-number / 400) + 0.01 * worker if loss is None else loss
    before = (number - 1) // interval
    return event(
        "step", 1.0 * number + 0.01 * worker, worker, step=number, loss=loss, learning_rate=1e-3, gradient_norm=1.0,
        loss_scale=None, tokens=number * TOKENS_PER_STEP, elapsed_seconds=1.0 * number,
        sync_seconds=0.1 * number, bytes_sent=1000 * before, rounds=before,
    )  # fmt: skip


def round_events(sequence: int, workers: int, H: int, **changed: object) -> Iterator[Event]:
    """All workers post at the end of H steps, the last worker 2.5 seconds after the others, and get the mean."""
    at = H * (sequence + 1)
    members = [
        {"worker": w, "anchor_digest": f"{sequence:016x}", "weight": 1.0, "norm": 2.0 + w,
         "report": {"inner_steps": at, "tokens": at * TOKENS_PER_STEP, "bytes_sent": 1000 * sequence,
                    "elapsed_seconds": 1.0 * at, "sync_seconds": 0.1 * at, "loss": 5.0}}
        for w in range(workers)
    ]  # fmt: skip
    for w in range(workers):
        late = 2.5 if w == workers - 1 else 0.0
        yield event("round_posted", at + 0.1 + late, w, sequence=sequence, fragment=0, step=at)
    for w in range(workers):
        fields: Event = {
            "sequence": sequence, "fragment": 0, "step": at, "norm": 2.0 + w, "mean_norm": 1.5, "codec_error": 2e-4,
            "similarity": 0.5, "cosines": [[a, b, 0.5] for a in range(workers) for b in range(a + 1, workers)],
            "waited_seconds": 0.5, "failure": None, "seconds": 0.5, "contributors": list(range(workers)), "refused": {},
            "bytes_sent": 1000, "members": members, "roster": [],
        }  # fmt: skip
        yield event("round", at + 3.0, w, **(fields | changed))


def failed_round(sequence: int, workers: int, H: int, reason: str) -> Iterator[Event]:
    return round_events(
        sequence, workers, H, failure=reason, mean_norm=None, contributors=[], members=[], similarity=None, cosines=[]
    )


def calm_events(workers: int = 2, steps: int = 100, H: int = 20, interval: int = 10) -> list[Event]:
    events = [started(worker, workers) for worker in range(workers)]
    for number in range(interval, steps + 1, interval):
        events += [step(worker, number, interval=H) for worker in range(workers)]
        if number % H == 0:
            events += round_events(number // H - 1, workers, H)
            loss = 6.0 * math.exp(-number / 400)
            events.append(
                event("validation", number + 4, step=number, loss=loss, perplexity=math.exp(loss), tokens=1000)
            )
    return events


def write_run(folder: Path, events: list[Event], steps: int = 400, engine: str = "torch_distributed") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = f'steps = {steps}\nmode = "diloco"\nengine = "{engine}"\n\n[model]\nname = "tiny"\n'
    (folder / "config.toml").write_text(text)
    (folder / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in events))
    return folder


def append(folder: Path, *events: Event) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in events)
