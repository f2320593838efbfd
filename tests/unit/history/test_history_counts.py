"""The live display, the final report and the page count the same things, from the same events."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.display.live import RunView
from diloco.cli.runs.status import headlines
from diloco.dashboard.metrics import exposition
from diloco.dashboard.runs import Run
from diloco.dashboard.snapshot import snapshot
from diloco.history.figures import RunFigures
from diloco.swarm.protocol.status import MemberStatus, RunStatus
from diloco.training.records.summary import summarize
from support.event_log import Event, history_of
from support.recorded_runs import CONFIG, RESUMED, RUN, event, member, merged, run_folder, step, validation

SWARM = replace(CONFIG, engine="swarm")


def failed(worker: int, sequence: int, number: int) -> Event:
    nothing = {"mean_norm": None, "members": [], "contributors": [], "bytes_sent": 0, "seconds": None}
    return merged(worker, sequence, number, **nothing, failure=f"round {sequence}: worker 1 was late")


def finished(worker: int, steps: int, rounds: int, rounds_failed: int) -> Event:
    report = {"elapsed_seconds": steps / 10, "sync_seconds": steps / 40, "bytes_sent": steps * 5}
    members = [member(one, steps, 2.0) for one in (0, 1)]
    for one in members:
        one["report"] |= report
    counts = {"rounds": rounds, "rounds_failed": rounds_failed, "inner_steps": steps, "tokens": steps * 100}
    return event("worker_finished", worker, stopped_early=False, members=members, **counts, **report)


def resumed(worker: int, number: int, rounds: int) -> Event:
    return event("resumed", worker, step=number, rounds=rounds, workers=2, workers_before=2, notes=[], new=False)


ENDED = [*RUN, finished(0, 20, 2, 0), finished(1, 20, 2, 0)]
FAILED = [*RUN, failed(1, 2, 30), merged(0, 2, 30), step(0, 30, 2.0), step(1, 30, 2.0)]
AGAIN = [*RUN[:13], resumed(0, 10, 1), resumed(1, 10, 1), *RESUMED[2:], validation(30, 2.5)]
RUNS = {
    "goes on": RUN,
    "has ended": ENDED,
    "failed for one worker": FAILED,
    "failed for one, ended": [*FAILED, finished(0, 30, 3, 0), finished(1, 30, 2, 1)],
    "failed for all": [
        *RUN,
        step(0, 30, 2.0) | {"rounds": 2},
        step(1, 30, 2.0) | {"rounds": 2},
        failed(0, 2, 30),
        failed(1, 2, 30),
    ],
    "resumed": AGAIN,
}


def counted(events: list[Event]) -> RunView:
    return RunView(CONFIG, history_of(events))


@pytest.mark.parametrize("name", RUNS)
def test_the_display_and_the_report_count_the_same(name: str) -> None:
    counts, summary = counted(RUNS[name]), summarize(CONFIG, history_of(RUNS[name]))
    workers = counts.workers
    here: dict[str, Any] = {
        "rounds": counts.merged_rounds,
        "rounds_failed": counts.failed_rounds,
        "inner_steps": max(worker.step for worker in workers),
        "tokens": sum(worker.tokens for worker in workers),
        "validation_perplexity": counts.perplexities[-1][1],
        "parameters": counts.history.parameters,
    }
    assert here == {key: summary[key] for key in here}
    if "ended" in name:
        assert max(worker.bytes_sent for worker in workers) == summary["bytes_sent_per_worker"]
        assert counts.utilization == pytest.approx(summary["compute_utilization"])


@pytest.mark.parametrize("name", RUNS)
def test_the_display_and_the_page_count_the_same(name: str) -> None:
    counts = counted(RUNS[name])
    page = snapshot(RunFigures(history_of(RUNS[name])), CONFIG.values(), None, 0.0)
    assert (page["rounds"]["merged"], page["rounds"]["failed"]) == (counts.merged_rounds, counts.failed_rounds)
    assert page["step"] == counts.step and page["parameters"] == counts.history.parameters
    assert page["tokens"] == sum(worker.tokens for worker in counts.workers)
    assert page["loss"] == pytest.approx(counts.loss)
    assert page["utilization"] == pytest.approx(counts.utilization)
    assert page["validation"]["perplexity"] == counts.perplexities[-1][1]
    for one in page["workers"]:
        assert one["bytes_sent"] == pytest.approx(counts.workers[one["worker"]].bytes_sent, abs=64)  # rounds since


def test_a_pause_is_no_time_of_the_run_on_the_page_as_in_the_report() -> None:
    times = [*range(len(RUN)), *range(1000, 1000 + len(RESUMED))]
    events = [one | {"time": float(time)} for time, one in zip(times, [*RUN, *RESUMED], strict=True)]
    page = snapshot(RunFigures(history_of(events)), CONFIG.values(), None, 0.0)
    assert page["seconds"] == summarize(CONFIG, history_of(events))["seconds"] == len(events) - 2


def test_a_failed_round_counts_once_and_a_resume_takes_it_back() -> None:
    counts = counted(RUNS["failed for all"])
    assert (counts.merged_rounds, counts.failed_rounds) == (2, 1)
    counts = counted([*RUNS["failed for all"], resumed(0, 10, 1), resumed(1, 10, 1)])
    assert (counts.merged_rounds, counts.failed_rounds) == (1, 0)


def test_a_member_with_fields_of_a_newer_version_is_counted() -> None:
    present = [{"member": 3, "where": "here", "step": 5, "loss": 2.0, "contributed": 1, "state": "", "later": 1}]
    history = history_of([event("members", present=present)])
    assert RunFigures(history).present == 1 and history.refused_events == 0
    [member] = RunFigures(history).members
    assert (member.number, member.values["step"]) == (3, 5)


def test_a_running_swarm_has_one_count_of_tokens_in_status_page_metrics_and_list(tmp_path: Path) -> None:
    """Two workers here, one of which missed the last round; more tokens are trained on than the 700 in means."""
    events = [
        event("swarm", 0, name="worker-0", run="r", peer="p0", addresses=[], founded=True, going_on=False),
        *RUN,
        event("members", 1, present=[], run_tokens=500) | {"time": 2000.0},
        event("members", 0, present=[], run_tokens=700) | {"time": 2001.0},
    ]
    history = history_of(events, elastic=True)
    page = snapshot(RunFigures(history), CONFIG.values() | {"engine": "swarm"}, None, 0.0)
    told = [MemberStatus(number=0, run_tokens=700, live=True), MemberStatus(number=1, run_tokens=500, live=True)]
    assert headlines(RunStatus("r", tuple(told), "", {}, {}))[2].startswith(f"{page['run_tokens']} tokens")
    assert page["tokens"] == sum(worker.tokens for worker in RunFigures(history).workers) > 700
    samples = exposition([{**page, "run": "mine"}]).splitlines()
    assert 'diloco_run_tokens_total{run="mine"} 700' in samples
    assert f'diloco_tokens_total{{run="mine"}} {page["tokens"]}' in samples
    assert Run(run_folder(tmp_path, events, ended=False), "mine").brief()["tokens"] == 700
    assert RunFigures(history, 2000.0).run_tokens == 500 and RunFigures(history_of(RUN)).run_tokens is None


def test_at_the_end_of_a_swarm_the_count_is_the_one_that_all_have_agreed_on() -> None:
    agreed = finished(0, 20, 2, 0) | {"tokens_by_worker": {"0": 400, "1": 450}}
    events = [*RUN, event("members", 1, present=[], run_tokens=900), agreed]
    figures = RunFigures(history_of(events, elastic=True))
    assert figures.run_tokens == summarize(SWARM, figures.history)["tokens"] == 850
