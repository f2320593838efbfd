"""events.jsonl -> the numbers that a sink draws. No clock, no files."""

from collections.abc import Iterator
from typing import Any

from diloco.sinks.base import Point
from diloco.training.records.events import Event

_OF_STEP = ("loss", "learning_rate", "gradient_norm", "tokens", "bytes_sent")
_OF_WORKER_IN_ROUND = ("norm", "waited_seconds", "bytes_sent")
_OF_ROUND = ("mean_norm", "similarity", "seconds")
_Number = tuple[str, Any, int, int | None]  # name, value, step, worker


class PointReader:
    """Knows what it has seen: who writes into this log, and which rounds have failed."""

    def __init__(self) -> None:
        self._here: set[int] = set()  # the workers of this machine
        self._told: set[tuple[int, bool]] = set()  # rounds, and whether they failed: every worker tells of each
        self._failed: set[int] = set()
        self._refused = 0

    def points(self, event: Event) -> list[Point]:
        """The numbers of one event; what is not a number (a loss that is NaN) is left out."""
        handler = getattr(self, f"_of_{event['type']}", None)
        found = handler(event) if handler is not None else ()
        return [
            Point(name, float(value), step, event["time"], worker)
            for name, value, step, worker in found
            if isinstance(value, int | float)
        ]

    def _of_worker_started(self, event: Event) -> Iterator[_Number]:
        self._here.add(event["worker"])
        self._told.clear()  # a resumed run may come to the same rounds again
        return iter(())

    def _of_step(self, event: Event) -> Iterator[_Number]:
        for name in _OF_STEP:
            yield f"train/{name}", event.get(name), event["step"], event["worker"]
        if event.get("tokens") and event.get("elapsed_seconds"):
            rate = event["tokens"] / event["elapsed_seconds"]
            yield "train/tokens_per_second", rate, event["step"], event["worker"]

    def _of_round(self, event: Event) -> Iterator[_Number]:
        step = event["step"]
        if event.get("mean_norm") is None and event.get("failure") is None:
            return  # headers only, as at the end of a run: nobody had work
        for name in _OF_WORKER_IN_ROUND:
            yield f"round/{name}", event.get(name), step, event["worker"]
        told = (event["sequence"], event.get("failure") is not None)
        if told in self._told:
            return
        self._told.add(told)
        if event.get("failure") is not None:
            self._failed.add(event["sequence"])
        self._refused += len(event.get("refused") or ())
        for name in _OF_ROUND:
            yield f"round/{name}", event.get(name), step, None
        yield "round/contributors", len(event.get("contributors") or ()), step, None
        yield "round/failed", len(self._failed), step, None
        yield "round/refused", self._refused, step, None
        yield from self._elsewhere(event)

    def _elsewhere(self, event: Event) -> Iterator[_Number]:
        """Workers of other machines write logs of their own; rounds say how they are doing."""
        for member in event.get("members") or ():
            report = member.get("report") or {}
            if member.get("worker") not in self._here and "inner_steps" in report:
                for name in ("loss", "tokens", "bytes_sent"):
                    yield f"train/{name}", report.get(name), report["inner_steps"], member["worker"]

    def _of_validation(self, event: Event) -> Iterator[_Number]:
        for name in ("loss", "perplexity"):
            yield f"validation/{name}", event.get(name), event["step"], None
