"""Figures of now and of a moment are counted alike, and the state of a worker is what it does."""

import math

import pytest

from diloco.history.figures import RunFigures
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import summarize
from support.dashboard_runs import event, started, step
from support.event_log import history_of
from support.golden_runs import RUNS


@pytest.mark.parametrize("name", RUNS)
def test_the_figures_of_now_are_those_of_the_last_moment(name: str) -> None:
    history = history_of(RUNS[name][1]())
    now, then = RunFigures(history), RunFigures(history, until=math.inf)
    assert (now.merged_rounds, now.refused) == (then.merged_rounds, then.refused)
    assert now.last_round is then.last_round and now.straggler == then.straggler
    assert (now.step, now.tokens, now.bytes_sent, now.loss) == (then.step, then.tokens, then.bytes_sent, then.loss)
    assert [vars(member) for member in now.members] == [vars(member) for member in then.members]
    assert now.states == then.states and now.perplexities == then.perplexities
    assert now.data_parallel_bytes == then.data_parallel_bytes


def test_a_worker_that_has_ended_is_done_though_its_network_process_is_alone_by_then() -> None:
    end = event("worker_finished", 20.0, inner_steps=10, tokens=5120)
    events = [started(0, 1), step(0, 10), end, event("alone", 21.0, member=0)]
    assert history_of(events).workers[0].state == "done"
    assert history_of([events[0], events[3]]).workers[0].state == "alone"


def test_the_step_of_a_stopped_run_is_the_one_that_its_summary_tells() -> None:
    """Ctrl-C ends each worker where it is; while they train, the step is that of the slowest."""
    steps = [started(0, 2), started(1, 2), step(0, 10), step(1, 20)]
    ends = [event("worker_finished", 30.0, n, inner_steps=at, stopped_early=True) for n, at in enumerate((16, 20))]
    assert RunFigures(history_of(steps)).step == 10 and RunFigures(history_of([*steps, ends[1]])).step == 10
    ended = history_of([*steps, *ends])
    assert RunFigures(ended).step == 20 == summarize(RunConfig(), ended)["inner_steps"]


def test_after_a_resume_it_is_told_again_what_the_workers_do_until_a_step_is_logged() -> None:
    resumed = event("resumed", 101.0, step=10, rounds=1, workers=1, new=False, notes=[])
    again = [started(0, 1, 100.0), resumed, event("starting", 102.0, doing="compiling")]
    events = [started(0, 1), step(0, 10), *again]
    assert str(RunFigures(history_of(events)).doing).startswith("compiling the model")
    assert RunFigures(history_of(events[:2])).doing is None
    assert RunFigures(history_of([*events, step(0, 20)])).doing is None
