"""trackio: a local experiment tracker with W&B's interface; `trackio show` opens it. TRACKIO_* variables are used.

It has no run summary: the final numbers are logged as summary/... at the last step.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.sinks.base import Point, Sink


class TrackioSink(Sink):
    """Logs to a trackio project."""

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
            auto_log_cpu=False,  # of this process, not of the training
            auto_log_gpu=False,
        )

    def write(self, points: Sequence[Point]) -> None:
        rows: dict[int, dict[str, float]] = {}
        for point in points:
            rows.setdefault(point.step, {})[point.label] = point.value
        for step, row in rows.items():
            self._session.log(row, step=step)

    def rewind(self, worker: int | None, step: int) -> None:
        """Do nothing: steps may go back; both passes stay in the record."""

    def flush(self) -> None:
        """Do nothing: trackio sends by itself."""

    def finish(self, summary: Mapping[str, object]) -> None:
        steps = summary.get("inner_steps")
        numbers = {f"summary/{key}": value for key, value in summary.items() if isinstance(value, int | float)}
        self._session.log(numbers, step=steps if isinstance(steps, int) else None)

    def close(self) -> None:
        if self._session is not None:
            self._session.finish()
