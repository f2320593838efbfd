"""Recorded runs of every kind, and all that the readers of a run make of each: what tests/golden/history freezes."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco.cli.display.comparison import ComparedRun, as_csv, savings, tables
from diloco.cli.display.live import RunView, plain_line, render
from diloco.cli.display.report import print_report
from diloco.cli.runs.ended_run import describe_end
from diloco.cli.runs.status import progress_line
from diloco.core.config import SyncConfig
from diloco.dashboard.metrics import exposition
from diloco.dashboard.runs import Run
from diloco.history.figures import RunFigures
from diloco.history.run_history import read_history
from diloco.plots.runs import panels_of, read_run
from diloco.sinks.base import Point, Sink
from diloco.sinks.follower import open_follower
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import read_run_file, to_toml
from diloco.training.records.summary import write_summary
from support.dashboard_runs import (
    START,
    TOKENS_PER_STEP,
    Event,
    append,
    calm_events,
    event,
    failed_round,
    round_events,
    started,
    step,
)

CONFIG = RunConfig(workers=2, steps=60, sync=SyncConfig(num_inner_steps=20, codec="fp16"))
SWARM = replace(CONFIG, engine="swarm", workers=1)
DATA_PARALLEL = replace(CONFIG, mode="data-parallel")


def _member(worker: int, at: int, sent: int) -> Event:
    report = {"inner_steps": at, "tokens": at * TOKENS_PER_STEP, "bytes_sent": sent, "elapsed_seconds": 1.0 * at}
    report |= {"sync_seconds": 0.1 * at, "loss": 5.0}
    return {"worker": worker, "anchor_digest": "c0ffee", "weight": 1.0, "norm": 2.0 + worker, "report": report}


def _ended(type_: str, worker: int, after: float, at: int, workers: Sequence[int], **more: object) -> Event:
    fields: Event = {
        "inner_steps": at, "stopped_early": False, "rounds": at // 20, "rounds_failed": 0, "rounds_dropped": 0,
        "contributions_refused": 0, "skipped_steps": 0, "bytes_sent": 1000 * (at // 20), "sync_seconds": 0.1 * at,
        "anchor_digest": "c0ffee", "confirmed": [], "resyncs": 0, "checkpoints_failed": 0,
        "tokens": at * TOKENS_PER_STEP, "elapsed_seconds": 1.0 * at,
        "members": [_member(one, at, 1000 * (at // 20)) for one in workers],
    }  # fmt: skip
    return event(type_, after, worker, **(fields | more))


def _plain() -> list[Event]:
    beginning = [
        event("sizes", -3.0, process_bytes=10, warnings=[]),
        *(started(worker, 2, -2.0) for worker in (0, 1)),
        event("corpus", -1.9, partition="iid", documents=9, skipped={"unreadable rows": 2}, shard_tokens=[5, 6]),
        event("starting", -1.8, doing="validation"),
        event("validation", -1.0, step=0, loss=6.2, perplexity=math.exp(6.2), tokens=1000),
        *(event("starting", -0.9, worker, doing="first step") for worker in (0, 1)),
        *(event("first_step", 0.4, worker, seconds=1.3) for worker in (0, 1)),
    ]
    ends = [_ended("worker_finished", worker, 66.0, 60, [0, 1]) for worker in (0, 1)]
    sample = event("sample", 67.0, step=60, prompt="Once", text=" upon a time")
    checkpoint = event("checkpoint", 44.5, step=40, rounds=2, bytes=12_000_000, seconds=0.2)
    return [*beginning, *calm_events(steps=60)[2:], checkpoint, *ends, sample]


def _resumed() -> list[Event]:
    """Killed at step 60, started again an hour later from the checkpoint of step 40."""
    first = calm_events(workers=2, steps=60)
    again = [started(worker, 2, 40.0) for worker in (0, 1)]
    told = {"step": 40, "rounds": 2, "workers": 2, "workers_before": 2, "steps_before": 60, "new": False}
    again += [event("resumed", 40.5, worker, **told, notes=[]) for worker in (0, 1)]
    again += [step(worker, number, interval=20) for number in (50, 60) for worker in (0, 1)]
    again += [*round_events(2, 2, 20), event("validation", 64.0, step=60, loss=5.1, perplexity=164.0, tokens=1000)]
    again += [_ended("worker_finished", worker, 66.0, 60, [0, 1]) for worker in (0, 1)]
    return [*first, *(one | {"time": one["time"] + 3600} for one in again)]


def _swarm() -> list[Event]:
    """Worker 0 is of this machine; worker 1, of another one, is in two rounds and is then lost."""
    events = [event("swarm", -2.0, name="worker-0", run="r", peer="p0", addresses=[], founded=True, going_on=False)]
    events += [started(0, 1, -1.0), event("waiting", -0.5, present=1, wanted=2)]
    events += [event("member_joined", 0.0, member=1, peer="p1", label="far")]
    events[1]["resolved"] = {**events[1]["resolved"], "engine": "swarm", "sync.merge": "mean"}
    for sequence in range(3):
        at = 20 * (sequence + 1)
        present = (0, 1) if sequence < 2 else (0,)
        events += [step(0, at - 10, interval=20), step(0, at, interval=20)]
        told = [one for one in round_events(sequence, 2, 20) if one["worker"] == 0]
        for one in told:
            if one["type"] == "round":
                one["members"] = one["members"][: len(present)]
                one["contributors"], one["roster"] = list(present), [0, 1]
                one["agreement"] = {str(worker): 0.5 for worker in present}
                for member in one["members"][1:]:
                    last = [sequence - 1, 0.1, 0.0, 2.5, 0.25, 2.0, 0.4, 0.1]
                    member["report"] |= {"inner_steps": at - 3, "last_round_seconds": last}
        events += told
        listed = [
            {"member": worker, "where": "far" if worker else "here", "step": at, "loss": 3.0, "contributed": sequence,
             "state": "training" if worker in present else "lost", "tokens": at * 512, "step_seconds": 1.0,
             "latency_seconds": 0.02, "silent_seconds": 0.1, "link": "direct"}
            for worker in (0, 1)
        ]  # fmt: skip
        in_means = (20 + 17) * 512 if sequence == 0 else (20 * sequence + 20 + 37) * 512
        events.append(event("members", at + 4.0, present=listed, run_tokens=in_means))
        if sequence == 1:
            lost = {"member": 1, "peer": "p1", "label": "far", "reason": "silent for 30 s"}
            events.append(event("member_lost", 50.0, **lost))
        loss = 6.0 * math.exp(-at / 400)
        measured = {"perplexity": math.exp(loss), "tokens": 1000, "measured_by": list(present)}
        events.append(event("validation", at + 5.0, step=at, loss=loss, **measured))
    more = {"tokens_by_worker": {"0": 60 * 512, "1": 37 * 512}, "confirmed": [_member(0, 60, 3000)]}
    events.append(_ended("worker_finished", 0, 66.0, 60, [0], **more))
    return sorted(events, key=lambda one: one["time"])


def _data_parallel() -> list[Event]:
    events = [started(worker, 2) for worker in (0, 1)]
    for number in range(10, 61, 10):
        sent = {"bytes_sent": 4_000_000 * number, "rounds": number}
        events += [step(worker, number) | sent for worker in (0, 1)]
    events += [event("validation", 61.0, step=60, loss=4.5, perplexity=90.0, tokens=1000)]
    members = [_member(worker, 60, 240_000_000) for worker in (0, 1)]
    ended = {"rounds": 60, "bytes_sent": 240_000_000, "members": members}
    return [*events, *(_ended("worker_finished", worker, 66.0, 60, [0, 1], **ended) for worker in (0, 1))]


def _failed() -> list[Event]:
    """A round fails, in the next a contribution is refused, then a loss is not finite."""
    events = calm_events(workers=2, steps=20)
    events += [step(worker, 30, interval=20) for worker in (0, 1)] + [
        step(worker, 40, interval=20) for worker in (0, 1)
    ]
    events += failed_round(1, 2, 20, "worker 1 did not answer")
    events += round_events(2, 2, 20, refused={"1": "its norm is 900"}, contributors=[0])
    bad = event("loss_not_finite", 64.0, 1, step=63, loss="nan", learning_rate=1e-3, last_loss=5.0)
    ended = {"rounds": 2, "rounds_failed": 1, "contributions_refused": 1, "stopped_early": True}
    return [
        *(*events, step(1, 60) | {"loss": None}, bad),
        *(_ended("worker_failed", worker, 66.0, 60 + worker, [0, 1], **ended, error="nan") for worker in (0, 1)),
    ]


def _going_on() -> list[Event]:
    """A run with a round under way, which has no summary."""
    events = calm_events(workers=2, steps=40)
    return [*events, event("round_posted", 60.1, 0, sequence=2, fragment=0, step=60)]


RUNS: dict[str, tuple[RunConfig, Callable[[], list[Event]], bool]] = {
    "plain": (CONFIG, _plain, True),
    "resumed": (CONFIG, _resumed, True),
    "swarm": (SWARM, _swarm, True),
    "data_parallel": (DATA_PARALLEL, _data_parallel, True),
    "failed": (CONFIG, _failed, True),
    "going_on": (CONFIG, _going_on, False),
}
"""By name: its configuration, its log, and whether it has ended with a summary."""


def write_golden_run(folder: Path, name: str) -> Path:
    config, events, ended = RUNS[name]
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    append(folder, *events())
    if ended:
        write_summary(folder, config)
    return folder


class _Recorder(Sink):
    package = "json"

    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        del config, resumed
        self.told: list[list[Any]] = []

    def write(self, points: Sequence[Point]) -> None:
        self.told += [[point.label, point.step, point.value] for point in points]

    def rewind(self, worker: int | None, step: int) -> None:
        self.told.append(["rewind", worker, step])

    def finish(self, summary: Mapping[str, object]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _text(show: Callable[[Console], None]) -> list[str]:
    file = io.StringIO()
    show(Console(file=file, width=110))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def outputs(folder: Path, name: str) -> dict[str, Any]:
    """All that the readers make of a run in `folder`, a folder of the run's name, as JSON."""
    config, _, ended = RUNS[name]
    run = Run(folder, name)
    moment = START + 45.5
    view = RunView(config, read_history(folder))
    made: dict[str, Any] = {
        "state": _without(run.state(), "now", "summary"),
        "state at a moment": _without(run.state(moment), "now"),
        "series": run.series(None, 30, None),
        "series at a moment": run.series(moment, 10, {0}),
        "rounds": run.rounds(None, 3),
        "config": run.config(),
        "brief": _without(run.brief(), "last_time"),
        "metrics": exposition([run.state()]).splitlines(),
        "plots": [_without(asdict(panel), "kind", "x_ticks") for panel in panels_of([read_run(folder, name)])],
        "progress": progress_line(folder, RunFigures(view.history)),
        "display": _text(lambda console: console.print(render(view))),
        "line": plain_line(view),
        "notes": view.history.notes.lines,
    }
    with open_follower(folder, "recorder", _Recorder) as follower:
        follower.catch_up()
        assert isinstance(follower.sink, _Recorder)
        made["points"] = follower.sink.told
    if ended:
        summary = write_summary(folder, config)
        made["summary"] = _without(summary, "versions")
        made["report"] = _report(folder, config)
        made["status"] = [_anywhere(line, folder) for line in describe_end(folder, summary)]
    return made


def _report(folder: Path, config: RunConfig) -> list[str]:
    lines = _text(lambda console: print_report(console, folder, write_summary(folder, config)))
    return [_anywhere(line, folder) for line in lines]


def _anywhere(line: str, folder: Path) -> str:
    """The line without where the run and the command are."""
    return re.sub(r"to continue: \S*diloco", "to continue: diloco", line.replace(str(folder), "FOLDER"))


def compared(folders: Mapping[str, Path]) -> dict[str, Any]:
    """What `diloco compare` says of the runs that have ended."""
    runs = [
        ComparedRun(name, Path(name), write_summary(folder, RUNS[name][0]), read_run_file(folder / "config.toml"))
        for name, folder in folders.items()
        if RUNS[name][2]
    ]
    reference = next(run for run in runs if run.name == "data_parallel")
    return {
        "csv": as_csv(runs, reference).splitlines(),
        "table": _text(lambda console: console.print(*tables(runs, reference, 110), sep="\n")),
        "savings": [savings(run, reference) for run in runs],
    }
