"""When a worker's state is saved, and how it is loaded.

All workers save after the same inner steps, at the end, and at a stop; always before the last rounds that end a run
(`finish`), which an uninterrupted run would not have had. When another worker's stop cuts a round short, the last step
is saved as an open one, without that round. A state that has merged such a round is not saved: the run then resumes
from the checkpoint before.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import Start, check_same_run, check_steps
from diloco.training.checkpoints.store import CheckpointStore
from diloco.training.checkpoints.worker_state import WorkerState
from diloco.training.config.run import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads one worker's state."""

    config: RunConfig
    state: WorkerState
    checkpoints: CheckpointStore
    emit: Callable[..., None]

    def after_step(self) -> None:
        """Save if a checkpoint is due."""
        step = self.state.mode.averager.inner_steps
        if self.checkpoints.owner.workers is None:
            due = self.checkpoints.became_due(self.config.checkpoints_until(step))
        else:
            due = self.config.checkpoint_due(step)
        if due:
            self._save()

    def at_end(self, *, open_step: bool) -> None:
        """Save before the last rounds. `open_step`: the rounds of the last inner step are among them."""
        if self.config.checkpoint.interval != 0:
            self._save(open_step=open_step, last=True)

    def before_cut(self) -> None:
        """Save in the middle of a step, before its rounds, which another worker's stop has cut short."""
        if self.config.checkpoint.interval != 0:
            self._save(open_step=True, last=True)

    def _save(self, *, open_step: bool = False, last: bool = False) -> None:
        """An open step is not counted in the checkpoint's step: the same step may be saved complete later."""
        outer = self.state.mode.averager
        outer.settle()
        reason = outer.unsavable()
        if reason is None:
            tensors, numbers = self.state.collect()
            step = outer.inner_steps - open_step
            self.checkpoints.save(step, outer.sequence, tensors, numbers, warm_steps=self._warm_steps(), last=last)
        else:
            logger.info("no checkpoint of step %d: %s", outer.inner_steps, reason)
            self.emit("checkpoint_skipped", step=outer.inner_steps, reason=reason)

    def _warm_steps(self) -> int:
        """Return how many steps the workers have taken together in a warm start."""
        if self.config.mode != "diloco" or self.checkpoints.owner.workers is None:
            return 0
        return min(self.state.mode.averager.inner_steps, self.config.sync.warm_start)

    def load(self, start: Start) -> dict[str, Any]:
        """Load the state of `start` and begin there; returns the fields of the event `resumed`."""
        checkpoint, owner = start.checkpoint, self.checkpoints.owner
        fields: dict[str, Any] = {"step": 0, "rounds": 0, "new": False, "steps_before": None}
        fields |= {"workers": owner.workers or 0, "workers_before": start.workers_before}
        if checkpoint is not None:
            check_steps(checkpoint, self.config.steps)
            check_same_run(checkpoint, self.checkpoints.lasting)
            fields["steps_before"] = self.state.load(checkpoint)["also"]["training"]["steps"]
            fields |= {"step": checkpoint.step, "rounds": checkpoint.moment.rounds}
            fields["new"] = owner.workers is not None and owner.worker >= checkpoint.moment.workers
            if fields["new"]:
                self.state.mode.start_from_anchor()
        self.checkpoints.begin(start.attempt, checkpoint)
        notes = [*start.warnings, *self._notes(start)]
        first = owner.worker == 0 or owner.workers is None
        if first and fields["steps_before"] not in (None, self.config.steps):
            notes.append(
                f"steps was {fields['steps_before']} and is {self.config.steps}: from here on the learning rate "
                "follows the schedule of that length"
            )
        return fields | {"notes": notes}

    def _notes(self, start: Start) -> list[str]:
        """What the user should know of this start; worker 0 says what concerns all workers."""
        owner, checkpoint = self.checkpoints.owner, start.checkpoint
        if checkpoint is None:
            return ["there is no checkpoint yet: the run starts again at its first step"] if owner.worker == 0 else []
        before, notes = checkpoint.moment.workers, []
        if owner.workers is None:
            return []
        if owner.worker >= before:
            notes.append(
                f"worker {owner.worker} is new: it starts from the anchor, with the inner optimizer of worker "
                f"{owner.worker % before}"
            )
        if owner.worker == 0:
            notes += [
                f"worker {worker} is not started again: {_lost(self.checkpoints.folder, start, worker)}"
                for worker in range(owner.workers, before)
            ]
            if before != owner.workers:
                notes.append(f"the shards are dealt again, from {before} workers to {owner.workers}")
        return notes


def _lost(run_folder: Path, start: Start, worker: int) -> str:
    """How much work is lost with a worker that is not started again, by its own checkpoint."""
    assert start.checkpoint is not None
    theirs = [
        checkpoint.manifests[0]
        for checkpoint in find_checkpoints(run_folder)[0]
        if checkpoint.worker == worker and checkpoint.moment == start.checkpoint.moment
    ]
    if not theirs:
        return "its inner steps since its last round are lost; no checkpoint of it here says how many"
    outer = theirs[-1].state["outer"]
    taken = theirs[-1].step - outer.get("jumped", 0)
    lost = taken - min((value for key, value in outer.items() if key.endswith(".merged_at")), default=taken)
    return f"its {lost} inner steps since its last round are lost" if lost else "none of its work is lost"
