"""The numbers of a run that a sink plots, event by event. No clock, no files."""

from collections.abc import Iterator
from typing import Any

from diloco.history.events import ROUND_STATISTICS, Event, RoundEndedEvent, StepEvent, ValidationEvent
from diloco.history.run_history import RunHistory
from diloco.sinks.base import Point

_OF_STEP = ("loss", "learning_rate", "gradient_norm", "tokens", "bytes_sent")
_OF_WORKER_IN_ROUND = (
    *(name for name, statistic in ROUND_STATISTICS.items() if statistic.of_each_worker),
    "norm",
    "waited_seconds",
    "bytes_sent",
)
_OF_ROUND = tuple(name for name, statistic in ROUND_STATISTICS.items() if not statistic.of_each_worker)
_Number = tuple[str, Any, int, int | None]  # name, value, step, worker


def points_of(event: Event, history: RunHistory) -> list[Point]:
    """The numbers that an event brings, after the history has taken it in; what is not a number is left out."""
    numbers: Iterator[_Number] = iter(())
    if isinstance(event, StepEvent):
        numbers = _of_step(event, history)
    elif isinstance(event, RoundEndedEvent) and (event.mean_norm is not None or event.failure is not None):
        numbers = _of_round(event, history)  # without either it is a round without work, as at the end of a run
    elif isinstance(event, ValidationEvent):
        numbers = _of_validation(event)
    return [
        Point(name, float(value), step, event.time, worker)
        for name, value, step, worker in numbers
        if value is not None
    ]


def _of_step(event: StepEvent, history: RunHistory) -> Iterator[_Number]:
    for name in _OF_STEP:
        yield f"train/{name}", getattr(event, name), event.step, event.worker
    speed = history.workers[event.worker].progress.tokens_per_second
    yield "train/tokens_per_second", speed or None, event.step, event.worker


def _of_round(event: RoundEndedEvent, history: RunHistory) -> Iterator[_Number]:
    step = event.step
    for name in _OF_WORKER_IN_ROUND:
        yield f"round/{name}", getattr(event, name), step, event.worker
    if not history.rounds.first_told(event):
        return
    for name in _OF_ROUND:
        yield f"round/{name}", getattr(event, name), step, None
    yield "round/contributors", len(event.contributors), step, None
    yield "round/failed", len(history.rounds.failed), step, None
    yield "round/refused", history.rounds.refused, step, None
    for member in event.members:  # workers on other machines write their own logs
        report = member.report
        if member.worker not in history.local_workers and report.inner_steps is not None:
            for name in ("loss", "tokens", "bytes_sent"):
                yield f"train/{name}", getattr(report, name), report.inner_steps, member.worker


def _of_validation(event: ValidationEvent) -> Iterator[_Number]:
    for name in ("loss", "perplexity"):
        yield f"validation/{name}", getattr(event, name), event.step, None
