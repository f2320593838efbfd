"""summary.json: a run in numbers, computed from its events alone.

Written for every end: complete, stopped by the user, or failed. A folder without it is a run that did not end; nothing
takes it for a complete one.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.training.config import RunConfig
from diloco.training.events import Event, read_events

SUMMARY_FILE = "summary.json"
Summary = dict[str, Any]


def data_parallel_bytes(parameters: int, steps: int, workers: int) -> int:
    """What a worker sends if fp32 gradients are averaged at every step: a reduce-scatter and an all-gather of each."""
    return round(steps * 2 * (workers - 1) / workers * 4 * parameters)


def summarize(config: RunConfig, events: list[Event], error: str | None = None) -> Summary:
    """The numbers of a run, from whatever events there are."""
    started = _last(events, "worker_started") or {}
    ended = [event for event in events if event["type"] in ("worker_finished", "worker_failed")]
    best = max(ended, key=lambda event: (event["type"] == "worker_finished", -event["worker"]), default=None)
    members = (best or {}).get("members") or _last_members(events)
    reports = [member["report"] for member in members]
    workers = started.get("workers", config.workers)
    steps = max([report["inner_steps"] for report in reports] + [(best or {}).get("inner_steps", 0)], default=0)
    sent = [report["bytes_sent"] for report in reports]
    baseline = data_parallel_bytes(started.get("parameters", 0), steps, workers)
    stopped = best is not None and best["stopped_early"]
    return {
        "status": "failed" if error else "stopped" if stopped else "complete",
        "error": error,
        "mode": config.mode,
        "model": config.model,
        "parameters": started.get("parameters"),
        "codec": config.sync.codec,
        **_validation(events),
        "unigram_perplexity": started.get("unigram_perplexity"),
        "inner_steps": steps,
        "num_inner_steps": config.sync.num_inner_steps if config.mode == "diloco" else 1,
        "rounds": (best or {}).get("rounds", 0),
        "rounds_failed": (best or {}).get("rounds_failed", 0),
        "workers": workers,
        "tokens": sum(report["inner_steps"] for report in reports) * started.get("tokens_per_step", 0),
        "bytes_sent_per_worker": max(sent, default=0),
        "data_parallel_bytes_per_worker": baseline,
        "communication_reduction": baseline / max(sent) if sent and max(sent) else None,
        "compute_utilization": _utilization(reports),
        "anchor_digests": [member["anchor_digest"] for member in members],
        "seconds": events[-1]["time"] - events[0]["time"] if events else 0.0,
        "training_seconds": max((report["elapsed_seconds"] for report in reports), default=0.0),
    }


def _last(events: list[Event], type_: str) -> Event | None:
    return next((event for event in reversed(events) if event["type"] == type_), None)


def _last_members(events: list[Event]) -> list[dict[str, Any]]:
    return next((event["members"] for event in reversed(events) if event.get("members")), [])


def _validation(events: list[Event]) -> Summary:
    validations = [event for event in events if event["type"] == "validation"]
    first, last = (validations[0], validations[-1]) if validations else ({}, {})
    return {
        "validation_loss": last.get("loss"),
        "validation_perplexity": last.get("perplexity"),
        "validation_step": last.get("step"),
        "initial_validation_perplexity": first.get("perplexity") if first.get("step") == 0 else None,
    }


def _utilization(reports: list[dict[str, Any]]) -> float | None:
    """The share of training time that was not spent on rounds, averaged over the workers."""
    shares = [1 - r["sync_seconds"] / r["elapsed_seconds"] for r in reports if r["elapsed_seconds"]]
    return statistics.fmean(shares) if shares else None


def write_summary(folder: Path, config: RunConfig, error: str | None = None) -> Summary:
    """Summarise a run folder's events into its summary.json, atomically."""
    summary = summarize(config, read_events(folder), error)
    temporary = folder / (SUMMARY_FILE + ".partial")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(folder / SUMMARY_FILE)
    return summary


def read_summary(folder: Path) -> Summary:
    """The summary of a run that has ended; says what is wrong with a folder that has none."""
    path = folder / SUMMARY_FILE
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    if not path.exists():
        raise ConfigError(f"{folder} has no {SUMMARY_FILE}: it is not a run folder, or that run has not ended")
    try:
        summary: Summary = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON ({error}): the run folder is damaged") from error
    return summary


def perplexity_gap(run: Summary, baseline: Summary) -> float | None:
    """Relative difference in validation perplexity: positive if the run is worse than the baseline."""
    mine, theirs = run["validation_loss"], baseline["validation_loss"]
    return None if mine is None or theirs is None else math.expm1(mine - theirs)
