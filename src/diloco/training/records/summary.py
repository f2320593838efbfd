"""summary.json: a run in numbers, computed from its events alone.

Written for every end: complete, stopped by the user, or failed. A folder without it is a run that has not ended.
"""

import json
import math
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.history import resuming as history
from diloco.history.log import Event, read_events
from diloco.history.progress import WorkerProgress
from diloco.training.config.run import RunConfig
from diloco.training.records.run_folder import RUN_FILE, how_to_end
from diloco.training.records.swarm_summary import steps_of_bytes, swarm_numbers, usual_workers
from diloco.version import __version__

SUMMARY_FILE = "summary.json"
Summary = dict[str, Any]
_ADDED_LATER = frozenset(
    {"versions", "engine", "resyncs", "members_seen", "resolved", "rounds_dropped", "trainable_parameters"}
)  # the summaries of earlier runs are read all the same


def data_parallel_bytes(parameters: int, steps: int, workers: int) -> int:
    """What a worker sends if fp32 gradients are averaged at every step: a reduce-scatter and an all-gather of each."""
    return round(steps * 2 * (workers - 1) / workers * 4 * parameters)


def summarize(config: RunConfig, events: list[Event], error: str | None = None) -> Summary:
    """The numbers of a run, from the events so far; what a resume took back is not counted."""
    log, events = events, history.current(events)
    started = _last(events, "worker_started") or {}
    ended = [event for event in events if event["type"] in ("worker_finished", "worker_failed")]
    best = max(ended, key=lambda event: (event["type"] == "worker_finished", -event["worker"]), default=None)
    began = bool(started or best)  # if not, and without an error, it was stopped before the first step
    if error is None and config.engine != "swarm":  # in a swarm the others train on
        error = _bad_loss(log)
    if error is None and began and (best is None or best["type"] != "worker_finished"):
        error = "no worker has come to the end"
    members = (best or {}).get("members") or _last_members(events)
    reports = [member["report"] for member in members]
    workers = started.get("workers", config.workers)
    steps = _steps(events, members)
    numbers: Summary = {
        "workers": workers,
        "members_seen": workers,
        "tokens": (sum(steps.values()) - sum(history.steps_not_taken(log).values()))
        * started.get("tokens_per_step", 0),
        "bytes_sent_per_worker": _bytes_sent(events, members),
        "compute_utilization": _utilization(reports),
        "anchor_digests": [member["anchor_digest"] for member in members],
        "training_seconds": max((report["elapsed_seconds"] for report in reports), default=0.0),
    }
    compared = (max(steps.values(), default=0), workers)
    if config.engine == "swarm":
        numbers |= swarm_numbers(log, events, best)
        compared = (steps_of_bytes(log, events), usual_workers(events))
    elif config.sync.dynamic_steps:  # positions in the schedule are not steps
        numbers["tokens"] = _own_tokens(events, members)
    sent, baseline = numbers["bytes_sent_per_worker"], data_parallel_bytes(_trainable(started), *compared)
    return {
        "status": "failed" if error else "stopped" if best is None or best["stopped_early"] else "complete",
        "error": error,
        "mode": config.mode,
        "model": config.model.name,
        "parameters": started.get("parameters"),
        "trainable_parameters": _trainable(started),
        "codec": config.sync.codec,
        **_validation(events),
        "unigram_perplexity": started.get("unigram_perplexity"),
        "inner_steps": max(steps.values(), default=0),
        "num_inner_steps": config.sync.num_inner_steps if config.mode == "diloco" else 1,
        **_rounds(events, ended),
        "rounds_dropped": sum({event["worker"]: event.get("rounds_dropped", 0) for event in ended}.values()),
        "contributions_refused": (best or {}).get("contributions_refused", 0),
        "checkpoints_failed": (best or {}).get("checkpoints_failed", 0),
        "resumes": max(0, len(list(history.starts(log))) - 1),
        "skipped_steps": sum({event["worker"]: event.get("skipped_steps", 0) for event in ended}.values()),
        "data_parallel_bytes_per_worker": baseline,
        "communication_reduction": baseline / sent if sent else None,
        "engine": config.engine,
        "resyncs": sum({event["worker"]: event.get("resyncs", 0) for event in ended}.values()),
        "versions": versions(),
        "seconds": history.seconds(log),
        "resolved": started.get("resolved", {}),
    } | numbers


def _trainable(started: Event) -> int:
    """The parameters that are averaged: with LoRA those of the adapters. Logs of earlier versions do not have it."""
    return int(started.get("trainable_parameters") or started.get("parameters") or 0)


def _bad_loss(log: list[Event]) -> str | None:
    """Why the latest start of a run has stopped, if a worker's loss was not finite."""
    bad = _last(history.latest_start(log), "loss_not_finite")
    return None if bad is None else f"the loss of worker {bad['worker']} is {bad['loss']} at step {bad['step']}"


def versions() -> dict[str, str]:
    """Of diloco, torch and Python; torch is not imported for it."""
    return {"diloco": __version__, "torch": version("torch"), "python": platform.python_version()}


def _last(events: list[Event], type_: str) -> Event | None:
    return next((event for event in reversed(events) if event["type"] == type_), None)


def _steps(events: list[Event], members: list[dict[str, Any]]) -> dict[int, int]:
    """The inner steps of each worker, from its reports and the log."""
    steps: dict[int, int] = {member["worker"]: member["report"]["inner_steps"] for member in members}
    for event in events:
        if event["type"] in ("step", "round", "worker_finished", "worker_failed"):
            step = event["step"] if "step" in event else event["inner_steps"]
            steps[event["worker"]] = max(steps.get(event["worker"], 0), step)
    return steps


def _own_tokens(events: list[Event], members: list[dict[str, Any]]) -> int:
    """What each worker says of itself, added up."""
    tokens: dict[int, int] = {member["worker"]: member["report"]["tokens"] for member in members}
    for event in events:
        if event["type"] in ("step", "worker_finished", "worker_failed"):
            tokens[event["worker"]] = max(tokens.get(event["worker"], 0), event.get("tokens", 0))
    return sum(tokens.values())


def _bytes_sent(events: list[Event], members: list[dict[str, Any]]) -> int:
    """Of the worker that sent most, with the rounds since its last step, as the terminal and the page count them."""
    workers: dict[int, WorkerProgress] = {}
    for event in events:
        workers.setdefault(event["worker"], WorkerProgress()).update(event)
    told = [member["report"]["bytes_sent"] for member in members]
    return max([*told, *(worker.bytes_sent for worker in workers.values())], default=0)


def _rounds(events: list[Event], ended: list[Event]) -> Summary:
    """As RunCounts has them: merged by a worker, and failed for a worker; in the log, or as a worker has counted."""
    rounds = [event for event in events if event["type"] == "round"]
    merged = {event["sequence"] for event in rounds if event["mean_norm"] is not None}
    failed = {event["sequence"] for event in rounds if event["failure"] is not None}
    told = [event["rounds"] for event in events if event["type"] in ("step", "worker_finished", "worker_failed")]
    told_failed = [event["rounds_failed"] for event in ended]
    return {"rounds": max([len(merged), *told]), "rounds_failed": max([len(failed), *told_failed])}


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
    write_file(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(folder: Path) -> Summary:
    """The summary of a run that has ended; says what is wrong with a folder that has none."""
    path = folder / SUMMARY_FILE
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    if not path.exists():
        if not (folder / RUN_FILE).is_file():
            raise ConfigError(f"{folder} is not a run folder: it has neither {SUMMARY_FILE} nor {RUN_FILE}")
        raise ConfigError(f"{folder} has no {SUMMARY_FILE}: that run has not ended; {how_to_end(folder)}")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): the run folder is damaged") from error
    expected = summarize(RunConfig(), [])
    for name in _ADDED_LATER & expected.keys():
        del expected[name]
    missing = sorted(expected.keys() - summary.keys()) if isinstance(summary, dict) else sorted(expected)
    if missing:
        raise ConfigError(f"{path} is not the summary of a run: it has no {', '.join(missing[:3])}")
    return cast(Summary, summary)


def perplexity_gap(run: Summary, baseline: Summary) -> float | None:
    """Relative difference in validation perplexity: positive if the run is worse than the baseline."""
    mine, theirs = run["validation_loss"], baseline["validation_loss"]
    return None if mine is None or theirs is None else math.expm1(mine - theirs)
