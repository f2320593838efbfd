"""summary.json from made-up events: every way in which a run can end."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.errors import ConfigError
from diloco.history.log import EVENTS_FILE
from diloco.run_lock import run_lock
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import (
    SUMMARY_FILE,
    data_parallel_bytes,
    perplexity_gap,
    read_summary,
    summarize,
    write_summary,
)
from support.event_log import Event, history_of

CONFIG = RunConfig(steps=20, sync=SyncConfig(num_inner_steps=10))
PARAMETERS = 1000
TOKENS_PER_STEP = 64
PROMISED = {
    *("validation_loss", "validation_perplexity", "inner_steps", "rounds", "rounds_failed", "workers", "tokens"),
    *("bytes_sent_per_worker", "data_parallel_bytes_per_worker", "communication_reduction", "compute_utilization"),
    *("anchor_digests", "seconds"),
}


def event(type_: str, worker: int = 0, time: float = 0.0, **fields: Any) -> Event:
    return {"v": 1, "time": time, "worker": worker, "type": type_, **fields}


def member(worker: int, steps: int, digest: str = "aa", sent: int = 2000) -> dict[str, Any]:
    report = {"inner_steps": steps, "bytes_sent": sent, "elapsed_seconds": 10.0, "sync_seconds": 1.0 + worker}
    return {"worker": worker, "anchor_digest": digest, "report": report}


def started(worker: int) -> Event:
    more = {"parameters": PARAMETERS, "tokens_per_step": TOKENS_PER_STEP, "unigram_perplexity": 50.0}
    return event("worker_started", worker, 100.0, workers=2, **more)


def step(worker: int, step: int, **more: Any) -> Event:
    fields = {"loss": 3.0, "bytes_sent": 1000, "rounds": step // 10, "elapsed_seconds": 1.0, "sync_seconds": 0.1}
    return event("step", worker, 101.0, step=step, **(fields | more))


def merged(worker: int, sequence: int, step: int, mean_norm: float | None = 1.0, failure: str | None = None) -> Event:
    members = [] if failure else [member(0, step), member(1, step)]
    mean_norm = None if failure else mean_norm
    return event(
        "round", worker, 102.0, sequence=sequence, step=step, mean_norm=mean_norm, failure=failure, members=members
    )


def ended(type_: str, worker: int, steps: int = 20, **more: Any) -> Event:
    fields: dict[str, Any] = {
        "inner_steps": steps,
        "stopped_early": steps < CONFIG.steps,
        "rounds": steps // 10,
        "rounds_failed": 1,
        "bytes_sent": 4000,
        "members": [member(0, steps), member(1, steps)],
    }
    return event(type_, worker, 110.0, **(fields | more))


def validation(step: int, loss: float) -> Event:
    return event("validation", 0, 103.0, step=step, loss=loss, perplexity=math.exp(loss), tokens=9)


BEGINNING = [started(0), started(1), validation(0, 5.0)]
COMPLETE = [
    *BEGINNING,
    *(step(worker, number) for number in (10, 20) for worker in (0, 1)),
    validation(20, 2.0),
    ended("worker_finished", 1),
    ended("worker_finished", 0),
]


def test_a_complete_run_has_all_the_numbers_that_are_promised() -> None:
    summary = summarize(CONFIG, history_of(COMPLETE))
    assert summary.keys() >= PROMISED
    assert summary["status"] == "complete"
    assert summary["error"] is None
    assert summary["inner_steps"] == 20
    assert summary["rounds"] == 2
    assert summary["rounds_failed"] == 1
    assert summary["workers"] == 2
    assert summary["tokens"] == 2 * 20 * TOKENS_PER_STEP
    assert summary["validation_loss"] == 2.0
    assert summary["validation_perplexity"] == pytest.approx(math.exp(2))
    assert summary["initial_validation_perplexity"] == pytest.approx(math.exp(5))
    assert summary["bytes_sent_per_worker"] == 4000
    assert summary["data_parallel_bytes_per_worker"] == 20 * 4 * PARAMETERS
    assert summary["communication_reduction"] == pytest.approx(20.0)
    assert summary["compute_utilization"] == pytest.approx(1 - 0.15)
    assert summary["anchor_digests"] == ["aa", "aa"]
    assert summary["seconds"] == 10.0
    assert summary["training_seconds"] == 10.0


def test_a_run_that_ended_before_its_last_step_is_stopped_not_complete() -> None:
    summary = summarize(CONFIG, history_of([*BEGINNING, *(ended("worker_finished", worker, 13) for worker in (0, 1))]))
    assert summary["status"] == "stopped"
    assert summary["inner_steps"] == 13
    assert summary["tokens"] == 2 * 13 * TOKENS_PER_STEP


def test_a_run_with_an_error_is_failed_whatever_its_workers_said() -> None:
    summary = summarize(CONFIG, history_of(COMPLETE), "worker 1 of 2 failed: killed by SIGKILL")
    assert summary["status"] == "failed"
    assert summary["error"] == "worker 1 of 2 failed: killed by SIGKILL"


def test_a_failed_run_says_how_far_the_surviving_worker_came() -> None:
    last = ended("worker_failed", 0, 17, members=[member(0, 10), member(1, 10)], error="lost the others")
    summary = summarize(CONFIG, history_of([*BEGINNING, step(1, 14), last]), "worker 1 of 2 failed")
    assert summary["status"] == "failed"
    assert summary["inner_steps"] == 17
    assert summary["rounds"] == 1
    assert summary["tokens"] == (17 + 14) * TOKENS_PER_STEP  # each as far as it is known to have come
    assert summary["validation_perplexity"] == pytest.approx(math.exp(5))


def test_a_worker_that_failed_is_never_a_complete_run_even_if_nobody_named_an_error() -> None:
    assert summarize(CONFIG, history_of([*BEGINNING, ended("worker_failed", 0)]))["status"] == "failed"
    assert summarize(CONFIG, history_of(BEGINNING))["status"] == "failed"


def test_a_run_that_was_stopped_before_any_worker_began_is_stopped_and_not_failed() -> None:
    summary = summarize(CONFIG, history_of([]))
    assert (summary["status"], summary["error"]) == ("stopped", None)
    assert summarize(CONFIG, history_of([]), "worker 0 of 2 failed")["status"] == "failed"


def test_if_all_workers_were_killed_steps_and_rounds_are_those_that_the_log_shows() -> None:
    rounds = [merged(0, 0, 10), merged(1, 0, 10), merged(0, 1, 15, failure="late"), merged(1, 1, 15, failure="late")]
    nobody_had_work = merged(0, 2, 15, mean_norm=None)
    events = [*BEGINNING, step(0, 10, rounds=0), *rounds, nobody_had_work, step(0, 18, rounds=1)]
    summary = summarize(CONFIG, history_of(events), "killed")
    assert summary["inner_steps"] == 18
    assert summary["rounds"] == 1
    assert summary["rounds_failed"] == 1
    assert summary["anchor_digests"] == ["aa", "aa"]
    assert summary["bytes_sent_per_worker"] == 2000


def test_without_any_event_there_is_a_summary_of_nothing_and_it_is_not_complete() -> None:
    summary = summarize(CONFIG, history_of([]))
    assert summary.keys() >= PROMISED
    assert summary["status"] != "complete"
    assert summary["inner_steps"] == summary["rounds"] == summary["tokens"] == summary["bytes_sent_per_worker"] == 0
    assert summary["validation_loss"] is None
    assert summary["communication_reduction"] is None
    assert summary["anchor_digests"] == []
    json.dumps(summary, allow_nan=False)


def test_the_first_evaluation_counts_as_the_beginning_only_if_it_was_at_the_beginning() -> None:
    events = [started(0), validation(10, 4.0), validation(20, 3.0), ended("worker_finished", 0)]
    assert summarize(CONFIG, history_of(events))["initial_validation_perplexity"] is None


def test_one_worker_sends_nothing_and_has_no_reduction() -> None:
    alone = [member(0, 20, sent=0)]
    first = {**started(0), "workers": 1}
    summary = summarize(CONFIG, history_of([first, ended("worker_finished", 0, members=alone, bytes_sent=0)]))
    assert summary["workers"] == 1
    assert summary["data_parallel_bytes_per_worker"] == 0
    assert summary["communication_reduction"] is None


@pytest.mark.parametrize(("workers", "expected"), [(1, 0), (2, 4000), (4, 6000), (8, 7000)])
def test_data_parallel_bytes_are_a_reduce_scatter_and_an_all_gather_of_fp32(workers: int, expected: int) -> None:
    assert data_parallel_bytes(parameters=100, steps=10, workers=workers) == expected


def test_the_baseline_counts_one_inner_step_a_round() -> None:
    assert summarize(RunConfig(mode="data-parallel"), history_of(COMPLETE))["num_inner_steps"] == 1


def test_a_written_summary_is_read_again_and_nothing_else_is_left(tmp_path: Path) -> None:
    lines = [json.dumps(event) + "\n" for event in COMPLETE]
    (tmp_path / EVENTS_FILE).write_text("".join(lines))
    written = write_summary(tmp_path, CONFIG)
    assert read_summary(tmp_path) == written == summarize(CONFIG, history_of(COMPLETE))
    assert {path.name for path in tmp_path.iterdir()} == {EVENTS_FILE, SUMMARY_FILE}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"status": "complete"}', "\xff"])
def test_a_damaged_summary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / SUMMARY_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=SUMMARY_FILE):
        read_summary(tmp_path)


def test_a_folder_without_a_summary_or_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither summary\.json nor config\.toml"):
        read_summary(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"has not ended; no process trains there: continue it with `diloco"):
        read_summary(tmp_path)
    with run_lock(tmp_path), pytest.raises(ConfigError, match="a process trains there: wait for it, or stop it"):
        read_summary(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_summary(tmp_path / "nowhere")


def test_the_gap_is_the_relative_difference_in_perplexity_and_positive_if_worse() -> None:
    run, baseline = {"validation_loss": math.log(11)}, {"validation_loss": math.log(10)}
    assert perplexity_gap(run, baseline) == pytest.approx(0.1)
    assert perplexity_gap(baseline, run) == pytest.approx(-1 / 11)
    assert perplexity_gap(run, {"validation_loss": None}) is None


def test_the_summary_of_a_version_that_dropped_no_rounds_is_read(tmp_path: Path) -> None:
    summary = summarize(CONFIG, history_of([started(0), step(0, 10)]))
    del summary["rounds_dropped"]
    (tmp_path / SUMMARY_FILE).write_text(json.dumps(summary))
    assert read_summary(tmp_path) == summary
