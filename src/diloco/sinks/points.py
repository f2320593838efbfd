"""Turns events into the numbers that a sink plots. No clock, no files."""

from collections.abc import Iterator
from typing import Any

from diloco.history.log import Event
from diloco.sinks.base import Point

_OF_STEP = ("loss", "learning_rate", "gradient_norm", "tokens", "bytes_sent")
_OF_WORKER_IN_ROUND = ("norm", "codec_error", "waited_seconds", "bytes_sent")
_OF_ROUND = ("mean_norm", "similarity", "seconds")
_Number = tuple[str, Any, int, int | None]  # name, value, step, worker


class PointReader:
    """Remembers the local workers, the rounds already counted, and the failed rounds."""

    def __init__(self) -> None:
        self._local_workers: set[int] = set()
        self._counted: set[tuple[int, bool]] = set()  # (round, failed): every worker reports each round
        self._failed: set[int] = set()
        self._refused = 0

    def points(self, event: Event) -> list[Point]:
        """The numbers of one event; a value that is not a number (a NaN loss is null) is skipped."""
        handler = getattr(self, f"_of_{event['type']}", None)
        found = handler(event) if handler is not None else ()
        return [
            Point(name, float(value), step, event["time"], worker)
            for name, value, step, worker in found
            if isinstance(value, int | float)
        ]

    def _of_worker_started(self, event: Event) -> Iterator[_Number]:
        self._local_workers.add(event["worker"])
        self._counted.clear()  # a resumed run may repeat rounds
        return iter(())

    def _of_renumbered(self, event: Event) -> Iterator[_Number]:
        """Its points go on under the new number: a sink cannot rename those that it has."""
        self._local_workers.discard(event["before"])
        self._local_workers.add(event["worker"])
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
            return  # a round without work, as at the end of a run
        for name in _OF_WORKER_IN_ROUND:
            yield f"round/{name}", event.get(name), step, event["worker"]
        outcome = (event["sequence"], event.get("failure") is not None)
        if outcome in self._counted:
            return
        self._counted.add(outcome)
        if event.get("failure") is not None:
            self._failed.add(event["sequence"])
        self._refused += len(event.get("refused") or ())
        for name in _OF_ROUND:
            yield f"round/{name}", event.get(name), step, None
        yield "round/contributors", len(event.get("contributors") or ()), step, None
        yield "round/failed", len(self._failed), step, None
        yield "round/refused", self._refused, step, None
        yield from self._of_remote_workers(event)

    def _of_remote_workers(self, event: Event) -> Iterator[_Number]:
        """Workers on other machines write their own logs; their reports come with the rounds."""
        for member in event.get("members") or ():
            report = member.get("report") or {}
            if member.get("worker") not in self._local_workers and "inner_steps" in report:
                for name in ("loss", "tokens", "bytes_sent"):
                    yield f"train/{name}", report.get(name), report["inner_steps"], member["worker"]

    def _of_validation(self, event: Event) -> Iterator[_Number]:
        for name in ("loss", "perplexity"):
            yield f"validation/{name}", event.get(name), event["step"], None
