"""An interrupted run told as one story, and one process at a time in a run folder."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.display.live import RunView
from diloco.errors import ConfigError
from diloco.history.figures import RunFigures
from diloco.history.workers import OwnWork
from diloco.run_lock import hold_as_worker, run_lock
from diloco.training.config.run import RunConfig
from diloco.training.processes.launcher import rotate_log
from diloco.training.records.summary import summarize
from support.event_log import Event, history_of


def event(type_: str, time: float, worker: int = 0, **fields: Any) -> Event:
    return {"v": 1, "time": time, "worker": worker, "type": type_, **fields}


def started(time: float, worker: int, workers: int = 2) -> Event:
    more = {"device": "cpu", "parameters": 100, "threads": 1, "tokens_per_step": 10, "unigram_perplexity": 9.0}
    return event("worker_started", time, worker, workers=workers, **more)


def step(time: float, worker: int, number: int) -> Event:
    more = {"loss": 1.0, "tokens": number * 10, "elapsed_seconds": time, "sync_seconds": 0.0, "rounds": 0}
    return event("step", time, worker, step=number, bytes_sent=number, **more)


def resumed(time: float, worker: int, at: int, **more: Any) -> Event:
    told = {"rounds": at // 10, "new": False, "workers": 2, "workers_before": 2, "steps_before": 40, "notes": []}
    return event("resumed", time, worker, step=at, **told | more)


def test_a_pause_before_a_worker_of_a_swarm_starts_again_does_not_count() -> None:
    swarm = {"founded": True, "going_on": False}
    first = [event("swarm", 0.0, **swarm), started(1.0, 0), step(9.0, 0, 10)]
    again = [event("swarm", 1000.0, **swarm), event("threads", 1001.0), started(1002.0, 0), step(1004.0, 0, 20)]
    clock = history_of([*first, *again]).clock
    assert (clock.starts, clock.pauses) == (2, [(1000.0, 991.0)])
    assert clock.seconds() == 9.0 + 4.0


def test_the_work_of_a_worker_that_joined_again_adds_up_and_a_resumed_count_goes_on() -> None:
    again = [event("joined", 20.0, step=30), step(21.0, 0, 1), step(22.0, 0, 2)]
    assert history_of([step(9.0, 0, 10), *again]).own_work[0] == OwnWork(120, 9.0 + 22.0, 0.0, 12)
    assert history_of([step(9.0, 0, 10), resumed(20.0, 0, 5), step(21.0, 0, 6)]).own_work[0].tokens == 60


def test_a_worker_that_joined_again_has_the_same_bytes_and_tokens_in_figures_and_summary() -> None:
    swarm = event("swarm", 0.0, founded=False)
    again = [started(19.0, 0), event("joined", 20.0, step=30), *(step(20.0 + number, 0, number) for number in (1, 2))]
    history = history_of([swarm, started(0.0, 0), step(9.0, 0, 10), *again], elastic=True)
    figures = RunFigures(history)
    summary = summarize(RunConfig(engine="swarm"), history)
    assert (figures.bytes_sent, figures.tokens) == (12, 120) == (summary["bytes_sent_per_worker"], summary["tokens"])
    assert figures.data_parallel_bytes == summary["data_parallel_bytes_per_worker"]
    assert figures.local[0].elapsed_seconds == summary["training_seconds"] == 9.0 + 22.0


def test_a_worker_elsewhere_that_joined_again_goes_on_where_it_was_lost() -> None:
    """Its own counters begin at 0 again; before, nothing of it was taken in until they were above the old ones."""

    def reported(time: float, sequence: int, position: int, steps: int) -> Event:
        report = {"inner_steps": position, "tokens": steps * 10, "bytes_sent": steps, "loss": float(position)}
        report |= {"elapsed_seconds": steps / 2, "sync_seconds": 0.0}
        told = {"worker": 1, "anchor_digest": "", "weight": 1.0, "norm": 1.0, "report": report}
        return event("round", time, sequence=sequence, step=position, fragment=0, failure=None, members=[told])

    before = [reported(10.0 * number, number, 10 * number, 10 * number) for number in (1, 2, 3)]
    worker = history_of([started(0.0, 0), *before, reported(90.0, 9, 90, 10)], elastic=True).workers[1]
    assert (worker.progress.step, worker.progress.loss) == (90, 90.0)
    assert (worker.progress.tokens, worker.progress.bytes_sent) == (400, 40)
    late = history_of([started(0.0, 0), *before, reported(90.0, 9, 20, 20)], elastic=True).workers[1]
    assert late.progress.step == 30, "a report from before is late, and no new start"


INTERRUPTED = [
    *(started(0.0, 0), started(0.0, 1)),
    *(step(1.0, 0, 10), step(1.0, 1, 10)),
    event("validation", 1.5, step=10, loss=1.0, perplexity=2.7),
    *(step(2.0, 0, 20), step(2.0, 1, 20)),
    event("validation", 2.5, step=20, loss=0.5, perplexity=1.6),
    *(started(100.0, 0), started(100.0, 1)),
    *(resumed(100.5, 0, 10), resumed(100.5, 1, 10)),
    *(step(101.0, 0, 15), step(101.5, 1, 15)),
]


def test_what_a_resume_took_back_is_left_out_and_the_pause_does_not_count() -> None:
    history = history_of(INTERRUPTED)
    columns = history.workers[0].columns.until(None)
    assert list(columns["step"][columns["logged"] > 0]) == [10, 15]
    assert history.clock.seconds() == pytest.approx(2.5 + 1.5)
    summary = summarize(RunConfig(), history_of(INTERRUPTED))
    assert (summary["inner_steps"], summary["tokens"], summary["resumes"]) == (15, 300, 1)
    assert summary["validation_step"] == 10 and summary["bytes_sent_per_worker"] == 15


def test_an_end_before_a_resume_is_no_end() -> None:
    end = event("worker_finished", 3.0, inner_steps=10, stopped_early=False, rounds=1, rounds_failed=0, bytes_sent=1)
    before = [started(0.0, 0), step(1.0, 0, 10), end]
    assert history_of(before).workers[0].ended is not None
    assert history_of([*before, started(9.0, 0), resumed(9.0, 0, 10)]).workers[0].ended is None


def test_workers_that_come_and_go_are_counted_for_the_steps_that_they_took() -> None:
    events = [
        *(started(0.0, worker) for worker in range(2)),
        *(step(1.0, worker, 10) for worker in range(2)),
        *(started(9.0, worker, 3) for worker in range(3)),
        *(resumed(9.0, worker, 10, workers=3, new=worker == 2) for worker in range(3)),
        *(step(10.0, worker, 20) for worker in range(3)),
        started(19.0, 0, 1),
        resumed(19.0, 0, 20, workers=1, workers_before=3),
        step(20.0, 0, 25),
    ]
    assert history_of(events).steps_not_taken() == 10
    assert summarize(RunConfig(), history_of(events))["tokens"] == (2 * 10 + 3 * 10 + 5) * 10
    assert summarize(RunConfig(), history_of(events))["workers"] == 1


def test_the_round_with_which_a_stopped_run_ended_is_taken_back_by_a_resume() -> None:
    """Its checkpoint is from before that round, which is at the same step; the next round has the same number."""
    rounds = [event("round", 2.0 + n, sequence=n, step=at, mean_norm=1.0, failure=None) for n, at in ((0, 10), (1, 15))]
    end = event("worker_finished", 4.0, inner_steps=15, stopped_early=True, rounds=2, tokens=150, bytes_sent=20)
    stopped = [started(0.0, 0, 1), step(1.0, 0, 10), *rounds, end]
    assert RunFigures(history_of(stopped)).merged_rounds == 2
    again = [*stopped, started(9.0, 0, 1), resumed(9.0, 0, 15, workers=1)]
    assert RunFigures(history_of(again)).merged_rounds == 1
    assert RunFigures(history_of([*again, rounds[1] | {"time": 11.0, "step": 20}])).merged_rounds == 2


def test_the_view_goes_back_to_where_the_run_goes_on() -> None:
    view = RunView(RunConfig(steps=40), history_of(INTERRUPTED[:-2]))
    assert view.step == 10 and view.perplexities == [(10, 2.7)]
    assert view.history.notes.lines == ["continuing from step 10"]
    full = event("checkpoint_failed", 102.0, 1, step=15, reason="full")
    alone = resumed(103.0, 0, 15, workers=1, notes=["worker 1 is not started again"])
    history = history_of([*INTERRUPTED[:-2], full, alone])
    assert "worker 1 could not write the checkpoint of step 15: full" in history.notes.lines
    assert set(history.workers) == {0} and "worker 1 is not started again" in history.notes.lines


def test_a_log_of_an_earlier_start_is_kept_under_a_number(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    for text in ("first", "second", "third"):
        rotate_log(log)
        log.write_text(text)
    rotate_log(log)
    assert [(tmp_path / f"worker-0.{n}.log").read_text() for n in (1, 2, 3)] == ["first", "second", "third"]
    assert not log.exists()


def test_one_process_at_a_time_trains_in_a_run_folder(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(ConfigError, match="another process trains in"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock_and_its_workers_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from diloco.run_lock import hold_as_worker, run_lock\n"
        "with run_lock(Path(sys.argv[1])):\n"
        "    hold_as_worker(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match="another process trains in"), run_lock(tmp_path):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with run_lock(tmp_path):
        hold_as_worker(tmp_path)
    monkeypatch.setattr("diloco.run_lock._LEFTOVER_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="workers of an earlier start still run"), run_lock(tmp_path):
        pass


def test_an_event_before_worker_started_ends_the_pause_before_a_resume() -> None:
    """`sizes` is what a resumed run writes first: until then nothing ran."""
    first = [{"type": type_, "time": time, "worker": 0} for type_, time in (("sizes", 0.0), ("worker_started", 1.0))]
    log = [*first, {"type": "step", "time": 40.0, "worker": 0, "step": 10}]
    log += [one | {"time": one["time"] + 1000} for one in log]
    clock = history_of(log).clock
    assert (clock.seconds(), clock.starts) == (80.0, 2)
    assert clock.pauses == [(1000.0, 960.0)] and clock.seconds(1020.0) == 60.0
