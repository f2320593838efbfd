"""Weights & Biases. WANDB_MODE=offline needs no network; WANDB_PROJECT, WANDB_NAME and WANDB_ENTITY are used.

The axis is our metric "step" instead of W&B's own step, which may only rise: workers report in turn, and a resumed run
goes back. Steps that were trained twice stay in the record twice.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.atomic_files import write_file
from diloco.sinks.base import Point, Sink

_ID_FILE = "run_id"


class WandbSink(Sink):
    """Logs to a Weights & Biases project."""

    package = "wandb"
    _session: Any = None

    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        del resumed  # wandb knows it from the id
        import wandb

        self._session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "diloco"),
            name=os.environ.get("WANDB_NAME", self.run.name),
            id=self._id(),
            resume="allow",
            dir=str(self.folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._session.define_metric("step")
        self._session.define_metric("*", step_metric="step")

    def _id(self) -> str:
        path = self.folder / _ID_FILE
        if not path.exists():
            write_file(path, uuid.uuid4().hex[:12])
        return path.read_text(encoding="utf-8")

    def write(self, points: Sequence[Point]) -> None:
        rows: dict[int, dict[str, float]] = {}
        for point in points:
            rows.setdefault(point.step, {"step": point.step})[point.label] = point.value
        for row in rows.values():
            self._session.log(row)

    def rewind(self, worker: int | None, step: int) -> None:
        """Do nothing: our own step axis may go back."""

    def flush(self) -> None:
        """Do nothing: wandb sends by itself."""

    def finish(self, summary: Mapping[str, object]) -> None:
        self._session.summary.update(dict(summary))

    def close(self) -> None:
        if self._session is not None:
            self._session.finish()
