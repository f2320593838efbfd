"""A worker's counters and its present speed, from its events."""

import pytest

from diloco.cli.display.live import RunView, plain_line
from diloco.dashboard.snapshot import snapshot
from diloco.history.events import read_event
from diloco.history.workers import WorkerProgress
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import summarize
from support.dashboard_runs import TOKENS_PER_STEP, event, round_events, started
from support.event_log import Event, history_of

COMPILING = 100.0
STEPS_PER_SECOND = 5.0
CONFIG = RunConfig(workers=1, steps=400)


def step(number: int, after: float, **more: object) -> Event:
    fields: dict[str, object] = {
        "step": number, "loss": 3.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens": number * TOKENS_PER_STEP,
        "elapsed_seconds": after, "sync_seconds": 0.0, "bytes_sent": 0, "rounds": 0,
    }  # fmt: skip
    return event("step", after, 0, **(fields | more))


def compiled(last: int, every: int = 20) -> list[Event]:
    """The first step takes COMPILING seconds, each later one 0.2."""
    events = [started(0, 1), event("first_step", COMPILING, seconds=COMPILING)]
    return events + [
        step(number, COMPILING + (number - 1) / STEPS_PER_SECOND) for number in range(every, last + 1, every)
    ]


def shown(events: list[Event]) -> tuple[RunView, dict[str, object]]:
    view = RunView(CONFIG, history_of(events))
    return view, snapshot(view, CONFIG.values(), None, 0.0)


@pytest.mark.parametrize("last", [20, 40, 200])
def test_the_speed_is_the_present_one_without_compiling_in_terminal_and_page(last: int) -> None:
    view, page = shown(compiled(last))
    assert view.tokens_per_second == pytest.approx(STEPS_PER_SECOND * TOKENS_PER_STEP)
    assert page["tokens_per_second"] == pytest.approx(STEPS_PER_SECOND * TOKENS_PER_STEP)
    assert view.time_left == pytest.approx((400 - last) / STEPS_PER_SECOND)
    assert page["seconds_left"] == pytest.approx((400 - last) / STEPS_PER_SECOND)
    assert "2,560 tokens/s" in plain_line(view)


def test_a_worker_that_becomes_slower_is_soon_shown_at_its_new_speed() -> None:
    progress = WorkerProgress()
    for number in range(10, 1000, 10):
        progress.update(read_event(step(number, number / 10)))
    assert progress.tokens_per_second == pytest.approx(10 * TOKENS_PER_STEP)
    for number in range(1000, 1100, 10):
        progress.update(read_event(step(number, 100 + (number - 1000), rounds=number)))
    assert progress.tokens_per_second == pytest.approx(TOKENS_PER_STEP, rel=0.01)


def test_the_speed_is_of_a_whole_round_where_a_round_takes_longer_than_a_minute() -> None:
    """A hundred seconds of inner steps, then a hundred in the round: half of the speed, at every moment."""
    progress, seconds = WorkerProgress(), 0.0
    for number in range(10, 2001, 10):
        seconds += 10.0 if number % 100 != 10 else 110.0
        progress.update(read_event(step(number, seconds, rounds=(number - 1) // 100)))
    assert progress.tokens_per_second == pytest.approx(TOKENS_PER_STEP / 2, rel=0.1)


def test_evaluations_are_in_the_forecast_and_not_in_the_speed() -> None:
    """Half of the time is spent on evaluations, which elapsed_seconds leaves out."""
    progress = WorkerProgress()
    for number in range(10, 101, 10):
        progress.update(read_event(step(number, 2.0 * number, elapsed_seconds=1.0 * number)))
    assert progress.tokens_per_second == pytest.approx(TOKENS_PER_STEP)
    assert progress.position_seconds == pytest.approx(2.0)


def test_bytes_are_of_the_same_moment_as_rounds_and_tokens() -> None:
    """The step before a round tells the bytes of before, and of fewer tokens if it is not the round's own step."""
    config = RunConfig(workers=1, steps=400)
    events = [started(0, 1), step(18, 18.0), *round_events(0, 1, 20)]
    view, page = shown(events)
    summary = summarize(config, history_of(events))
    assert view.merged_rounds == summary["rounds"] == 1
    assert view.workers[0].bytes_sent == summary["bytes_sent_per_worker"] == 1000
    assert view.workers[0].tokens == page["tokens"] == summary["tokens"] == 20 * TOKENS_PER_STEP
    communication = page["communication"]
    assert isinstance(communication, dict) and communication["bytes_sent_per_worker"] == 1000
    assert view.step == page["step"] == 20


def test_the_counters_after_a_resume_are_those_of_the_step_that_it_goes_back_to() -> None:
    again = event("resumed", 301.0, step=40, rounds=0, workers=1, workers_before=1, new=False, notes=[])
    _, page = shown([*compiled(100), started(0, 1, 300.0), again])
    assert (page["step"], page["tokens"]) == (40, 40 * TOKENS_PER_STEP)
