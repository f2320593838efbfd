"""trackio: a local experiment tracker with W&B's interface; `trackio show` opens it. TRACKIO_* variables count.

It has no summary of a run: the last numbers are logged as summary/... at the last step.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.sinks.base import Point, Sink


class TrackioSink(Sink):
    package = "trackio"
    _session: Any = None

    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        import trackio

        self._session = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "diloco"),
            name=self.run.name,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_cpu=False,  # of this process, which says nothing about the training
            auto_log_gpu=False,
        )

    def write(self, points: Sequence[Point]) -> None:
        rows: dict[int, dict[str, float]] = {}
        for point in points:
            rows.setdefault(point.step, {})[point.label] = point.value
        for step, row in rows.items():
            self._session.log(row, step=step)

    def rewind(self, worker: int | None, step: int) -> None:
        """Nothing: steps may go back, and both ways stay in the record."""

    def flush(self) -> None:
        """Nothing: it sends by itself."""

    def finish(self, summary: Mapping[str, object]) -> None:
        steps = summary.get("inner_steps")
        numbers = {f"summary/{key}": value for key, value in summary.items() if isinstance(value, int | float)}
        self._session.log(numbers, step=steps if isinstance(steps, int) else None)

    def close(self) -> None:
        if self._session is not None:
            self._session.finish()
