"""When a worker is saved, and how one that was saved goes on.

A save happens after the same inner steps on all workers, at the end, and at a stop; always before the last rounds that
end a run (`finish`), which an uninterrupted run would not have had. When another worker's stop cuts a round short, the
last step is saved as an open one, without that round. A state that has merged such a round is not saved: whoever
resumes then goes on from the checkpoint before.
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
    """One worker's state and its checkpoints."""

    config: RunConfig
    state: WorkerState
    checkpoints: CheckpointStore
    tell: Callable[..., None]

    def after_step(self) -> None:
        step, swarm = self.state.mode.averager.inner_steps, self.checkpoints.owner.workers is None
        if (
            self.checkpoints.became_due(self.config.checkpoints_until(step))
            if swarm
            else self.config.checkpoint_due(step)
        ):
            self._save()

    def at_end(self, *, open_step: bool) -> None:
        """Before the last rounds."""
        if self.config.checkpoint.interval != 0:
            self._save(open_step=open_step)

    def before_cut(self) -> None:
        """In the middle of a step, before its rounds, which another worker's stop has cut short."""
        if self.config.checkpoint.interval != 0:
            self._save(open_step=True)

    def _save(self, *, open_step: bool = False) -> None:
        """An open step, whose rounds are to come, does not count: the whole one may be saved later."""
        outer = self.state.mode.averager
        outer.settle()
        reason = outer.unsavable()
        if reason is None:
            self.checkpoints.save(outer.inner_steps - open_step, outer.sequence, *self.state.saved())
        else:
            logger.info("no checkpoint of step %d: %s", outer.inner_steps, reason)
            self.tell("checkpoint_skipped", step=outer.inner_steps, reason=reason)

    def load(self, start: Start) -> dict[str, Any]:
        """Go on from there; returns what an event tells of it."""
        checkpoint, owner = start.checkpoint, self.checkpoints.owner
        told: dict[str, Any] = {"step": 0, "rounds": 0, "new": False, "steps_before": None}
        told |= {"workers": owner.workers or 0, "workers_before": start.workers_before}
        if checkpoint is not None:
            check_steps(checkpoint, self.config.steps)
            check_same_run(checkpoint, self.checkpoints.lasting)
            told["steps_before"] = self.state.load(checkpoint)["also"]["training"]["steps"]
            told |= {"step": checkpoint.step, "rounds": checkpoint.moment.rounds}
            told["new"] = owner.workers is not None and owner.worker >= checkpoint.moment.workers
            if told["new"]:
                self.state.mode.start_from_anchor()
        self.checkpoints.begin(start.attempt, checkpoint)
        notes = [*start.warnings, *self._notes(start)]
        first = owner.worker == 0 or owner.workers is None
        if first and told["steps_before"] not in (None, self.config.steps):
            notes.append(
                f"steps was {told['steps_before']} and is {self.config.steps}: from here on the learning rate follows "
                "the schedule of that length"
            )
        return told | {"notes": notes}

    def _notes(self, start: Start) -> list[str]:
        """What going on here means, in words; the first worker tells what concerns all."""
        owner, checkpoint = self.checkpoints.owner, start.checkpoint
        if checkpoint is None:
            return ["there is no checkpoint yet: the run begins again at its first step"] if owner.worker == 0 else []
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
                f"worker {worker} takes no further part: {_lost(self.checkpoints.folder, start, worker)}"
                for worker in range(owner.workers, before)
            ]
            if before != owner.workers:
                notes.append(f"the data is shared out anew, from {before} workers to {owner.workers}")
        return notes


def _lost(run_folder: Path, start: Start, worker: int) -> str:
    """Of the work of a worker that is left out, which only its own checkpoint knows."""
    assert start.checkpoint is not None
    theirs = [
        checkpoint.manifests[0]
        for checkpoint in find_checkpoints(run_folder)[0]
        if checkpoint.worker == worker and checkpoint.moment == start.checkpoint.moment
    ]
    if not theirs:
        return "its inner steps since its last round are lost; no checkpoint of it here tells how many"
    outer = theirs[-1].state["outer"]
    taken = theirs[-1].step - outer.get("jumped", 0)
    lost = taken - min((value for key, value in outer.items() if key.endswith(".merged_at")), default=taken)
    return f"its {lost} inner steps since its last round are lost" if lost else "none of its work is lost"
