"""TensorBoard: event files in the run folder, written with TensorBoard's own writer. Needs no torch.

Each worker is a separate run, so that the losses of all workers are in one chart:
    tensorboard --logdir runs
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.sinks.base import Point, Sink

_FLUSH_SECONDS = 3600  # the follower calls flush()


class TensorBoardSink(Sink):
    """Writes TensorBoard's event files."""

    package = "tensorboard"

    def __init__(self, run: Path, folder: Path) -> None:
        super().__init__(run, folder)
        self._writers: dict[int | None, Any] = {}

    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        if not resumed:
            plain = {
                key: value if isinstance(value, bool | int | float) else str(value) for key, value in config.items()
            }
            self._add(None, 0, None, hparams_pb(plain))
            self._add(None, 0, None, _table("config", config))

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            value = Summary.Value(tag=point.name, simple_value=point.value)
            self._add(point.worker, point.step, point.time, Summary(value=[value]))

    def rewind(self, worker: int | None, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # TensorBoard then shows only later points from `step` on.
        self._writer(worker).add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def finish(self, summary: Mapping[str, object]) -> None:
        steps = summary.get("inner_steps")
        self._add(None, steps if isinstance(steps, int) else 0, None, _table("summary", summary))

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, worker: int | None) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if worker not in self._writers:
            folder = self.folder / ("all" if worker is None else f"worker-{worker}")
            self._writers[worker] = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)
        return self._writers[worker]

    def _add(self, worker: int | None, step: int, time: float | None, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer(worker).add_event(Event(step=step, wall_time=time, summary=summary))


def _table(tag: str, rows: Mapping[str, object]) -> Any:
    """Return a Markdown table for TensorBoard's text view."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    lines = [f"| {key} | {str(value).replace('|', '&#124;')} |" for key, value in rows.items()]
    return text_pb(tag, "\n".join([f"| {tag} | |", "| --- | --- |", *lines]))
