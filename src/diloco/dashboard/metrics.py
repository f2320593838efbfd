"""A run's state as Prometheus reads it: the text exposition format, version 0.0.4.

A pure function of what the page shows (snapshot.py), so that both count the same. A number that is not known has no
sample. After a resume a counter can be lower than before, which Prometheus takes for a restart.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diloco.history.events import ROUND_STATISTICS
from diloco.history.members import GONE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Json = Mapping[str, Any]
Sample = tuple[dict[str, str], object]
"""Labels besides `run`, and a value."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge"]
    help: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric("diloco_run_status", "gauge", "1 for the status that the run has: training, complete, failed, …"),
        Metric("diloco_last_event_timestamp_seconds", "gauge", "When the run wrote its last event, since 1970."),
        Metric("diloco_step", "gauge", "Inner steps of the slowest worker; in a swarm, of the furthest local one."),
        Metric("diloco_steps", "gauge", "Inner steps that the run shall take."),
        Metric("diloco_loss", "gauge", "Mean training loss of the workers of this machine."),
        Metric("diloco_validation_loss", "gauge", "Latest validation loss."),
        Metric("diloco_validation_perplexity", "gauge", "Latest validation perplexity."),
        Metric("diloco_tokens_total", "counter", "Tokens that all known workers have trained on."),
        Metric(
            "diloco_run_tokens_total", "counter", "Tokens of all workers in a swarm's means, on every machine alike."
        ),
        Metric("diloco_tokens_per_second", "gauge", "Present speed of all workers, while the run trains."),
        Metric("diloco_utilization_ratio", "gauge", "Share of the time that was not spent on rounds, since the start."),
        Metric("diloco_rounds_total", "counter", "Merged rounds."),
        Metric("diloco_rounds_failed_total", "counter", "Rounds that gave a worker of this machine no mean."),
        Metric("diloco_contributions_refused_total", "counter", "Contributions that are in no mean."),
        *(
            Metric(f"diloco_round_{name}", "gauge", f"{statistic.meaning}, in the latest merged one.")
            for name, statistic in ROUND_STATISTICS.items()
        ),
        Metric("diloco_bytes_sent_total", "counter", "Bytes that a worker has sent for rounds."),
        Metric("diloco_data_parallel_bytes", "gauge", "Bytes sent data-parallel, until a worker's last round."),
        Metric("diloco_members", "gauge", "Members of the run, by state."),
        Metric("diloco_worker_step", "gauge", "Inner steps of a worker."),
        Metric("diloco_worker_lag_steps", "gauge", "Steps that a worker is behind the furthest one."),
        Metric("diloco_worker_tokens_per_second", "gauge", "Present speed of a worker, while the run trains."),
        Metric("diloco_worker_loss", "gauge", "Training loss of a worker."),
    )
}


def exposition(states: Sequence[Json]) -> str:
    """Write the samples of all runs. `states`: what `snapshot` makes of each run, with its name as `run`."""
    samples_of: dict[str, list[str]] = {name: [] for name in METRICS}
    for state in states:
        for name, (labels, value) in _samples(state):
            number = _number(value)
            if number is not None:
                samples_of[name].append(f"{name}{_labels({'run': str(state['run'])} | labels)} {number}\n")
    lines = []
    for name, samples in samples_of.items():
        if samples:
            metric = METRICS[name]
            lines += [f"# HELP {name} {_escaped(metric.help)}\n", f"# TYPE {name} {metric.kind}\n", *samples]
    return "".join(lines)


def _samples(state: Json) -> Iterator[tuple[str, Sample]]:
    rounds = state["rounds"]
    validation = state["validation"] or {}
    last = state["rounds"]["last"] or {}
    trains = state["status"] == "training"
    plain = {
        "diloco_last_event_timestamp_seconds": state["last_time"],
        "diloco_step": state["step"],
        "diloco_steps": state["steps"],
        "diloco_loss": state["loss"],
        "diloco_validation_loss": validation.get("loss"),
        "diloco_validation_perplexity": validation.get("perplexity"),
        "diloco_tokens_total": state["tokens"],
        "diloco_run_tokens_total": state["run_tokens"],
        "diloco_tokens_per_second": state["tokens_per_second"] if trains else None,
        "diloco_utilization_ratio": state["utilization"],
        "diloco_rounds_total": rounds["merged"],
        "diloco_rounds_failed_total": rounds["failed"],
        "diloco_contributions_refused_total": rounds["refused"],
        **{f"diloco_round_{name}": last.get(name) for name in ROUND_STATISTICS},
        "diloco_data_parallel_bytes": state["communication"]["data_parallel_bytes_per_worker"],
    }
    yield "diloco_run_status", ({"status": str(state["status"])}, 1)
    for name, value in plain.items():
        yield name, ({}, value)
    counts = Counter(
        str(participant["state"]).partition(":")[0] for participant in state["members"] or state["workers"]
    )
    for member_state, count in sorted(counts.items()):
        yield "diloco_members", ({"state": member_state or "training"}, count)
    for worker in state["workers"]:
        label = {"worker": str(worker["worker"])}
        yield "diloco_bytes_sent_total", (label, worker["bytes_sent"])
        yield (
            "diloco_worker_tokens_per_second",
            (label, worker["tokens_per_second"] if trains and worker["active"] else None),
        )
        yield "diloco_worker_loss", (label, worker["loss"])
    steps = _steps(state)
    for number, step in sorted(steps.items()):
        yield "diloco_worker_step", ({"worker": str(number)}, step)
        yield "diloco_worker_lag_steps", ({"worker": str(number)}, max(steps.values()) - step)


def _steps(state: Json) -> dict[int, float]:
    """Return the step of each worker; members of a swarm that are gone have none."""
    steps = {participant["worker"]: participant["step"] for participant in state["workers"]}
    for participant in state["members"]:
        if participant["state"] in GONE:
            steps.pop(participant["member"], None)
        elif participant["step"] is not None:
            steps[participant["member"]] = max(participant["step"], steps.get(participant["member"]) or 0)
    return {worker: step for worker, step in steps.items() if step is not None}


def _number(value: object) -> str | None:
    """Write a number; None for nan, whose meaning for Prometheus no field of a run has, and for all other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _labels(labels: Mapping[str, str]) -> str:
    quoted = (f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
