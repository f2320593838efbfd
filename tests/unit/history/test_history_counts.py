"""The live display, the final report and the page count the same things, from the same events."""

from typing import Any

import pytest

from diloco.cli.display.view import RunView
from diloco.dashboard.snapshot import snapshot
from diloco.history.figures import RunFigures
from diloco.training.records.summary import summarize
from support.event_log import Event, history_of
from support.recorded_runs import CONFIG, RESUMED, RUN, event, member, merged, step, validation


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
        assert 1 - counts.sync_share == pytest.approx(summary["compute_utilization"])


@pytest.mark.parametrize("name", RUNS)
def test_the_display_and_the_page_count_the_same(name: str) -> None:
    counts = counted(RUNS[name])
    page = snapshot(RunFigures(history_of(RUNS[name])), CONFIG.values(), None, 0.0)
    assert (page["rounds"]["merged"], page["rounds"]["failed"]) == (counts.merged_rounds, counts.failed_rounds)
    assert page["step"] == counts.step and page["parameters"] == counts.history.parameters
    assert page["tokens"] == sum(worker.tokens for worker in counts.workers)
    assert page["loss"] == pytest.approx(counts.loss)
    assert page["utilization"] == pytest.approx(1 - counts.sync_share)
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
    assert history.present == 1 and history.refused_events == 0
    [member] = RunFigures(history).members
    assert (member.number, member.values["step"]) == (3, 5)
