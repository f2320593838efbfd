"""A worker's whole state as named tensors and numbers, and back: resuming gives the same bits (invariant I5).

    model.NAME                 parameters θ_i and saved buffers; not what is frozen
    inner.KEY.NAME             the inner optimizer's state by parameter: the order of its groups does not matter
    outer.KIND.NAME            anchors, outer momentum, errors; in_flight.SEQUENCE.NAME: means that are not merged yet
    rng.RANK.DEVICE            torch's random number generators
    also.PART.KEY              everything else that has a state_dict(): the loop, the gradient scaler

Learning rates are not saved: they follow from the step, and from the number of steps if that is changed. `Checkpointer`
says when the state is saved, and how a run begins from one.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.errors import CheckpointError
from diloco.history.events import CheckpointSkippedEvent, Emit
from diloco.outer.tensors import Numbers, TensorPieces, bare_name, pieces_of
from diloco.training.checkpoints.manifests import Checkpoint, find_checkpoints
from diloco.training.checkpoints.resume import Start, check_same_run, check_steps
from diloco.training.checkpoints.store import CheckpointStore
from diloco.training.checkpoints.tensor_files import SavedTensor, read_tensors, saved_tensors
from diloco.training.config.run import RunConfig
from diloco.training.inner import set_position
from diloco.training.modes import Mode

logger = logging.getLogger(__name__)


class HasState(Protocol):
    """A part of a worker that is saved: its state dict holds tensors and what JSON can hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class WorkerState:
    """The state of one rank of a worker."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        schedule: LambdaLR,
        mode: Mode,
        parts: Mapping[str, HasState],
        rank: int = 0,
    ) -> None:
        self.model = model
        self.inner = inner
        self.schedule = schedule
        self.mode = mode
        self.parts = dict(parts)
        self.rank = rank

    # Saving

    def collect(self) -> tuple[dict[str, TensorPieces], Numbers]:
        """Return what to save: views of the live tensors, and numbers. Rounds in flight must be settled."""
        outer, outer_numbers = self.mode.averager.saved()
        tensors = self._model() | outer | self._random()
        inner: dict[str, dict[str, Any]] = {}
        for name, state in self._inner_states().items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"inner.{key}.{name}"] = pieces_of(value)
                else:
                    inner.setdefault(name, {})[key] = value
        also: dict[str, Numbers] = {}
        for part_name, part in self.parts.items():
            also[part_name] = {}
            for key, value in part.state_dict().items():
                if isinstance(value, Tensor):
                    tensors[f"also.{part_name}.{key}"] = pieces_of(value)
                else:
                    also[part_name][key] = value
        numbers: Numbers = {"outer": outer_numbers, "inner": inner, "also": also}
        return tensors, numbers | {"schedule": self.mode.averager.inner_steps}  # of the next step, also of an open one

    def _model(self) -> dict[str, TensorPieces]:
        return {f"model.{bare_name(name)}": pieces_of(tensor) for name, tensor in trained_tensors(self.model).items()}

    def _inner_states(self) -> dict[str, dict[str, Any]]:
        """Return the inner optimizer's state by parameter name; parameters that have not been stepped have none."""
        state = self.inner.state
        return {name: state[p] for name, p in self._parameters().items() if p in state}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {bare_name(name): parameter for name, parameter in self.model.named_parameters()}

    def _random(self) -> dict[str, TensorPieces]:
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        return {  # not replicated: each rank has its own
            f"rng.{self.rank}.{device}": replace(pieces_of(state), replicated=False) for device, state in states.items()
        }

    # Loading

    def load(self, checkpoint: Checkpoint) -> Numbers:
        """Load everything, from however many ranks saved it; returns the numbers."""
        numbers: Numbers = dict(checkpoint.manifests[self.rank % len(checkpoint.manifests)].state)
        saved = saved_tensors(checkpoint.folder)
        outer, outer_loaded = self.mode.averager.memory_to_load(numbers["outer"])
        inner = self._inner_targets(saved)
        also = {name: _empty(data) for name, data in saved.items() if name.startswith("also.")}
        random = {name: _empty(data) for name, data in saved.items() if name.startswith(self._random_prefix(saved))}
        others = {name: pieces_of(tensor) for name, tensor in (inner | also | random).items()}
        read_tensors(checkpoint.folder, self._model() | outer | others)
        outer_loaded()
        self._load_inner(inner, numbers["inner"])
        set_position(self.schedule, numbers["schedule"])
        for part_name, part in self.parts.items():
            prefix = f"also.{part_name}."
            own = {name.removeprefix(prefix): tensor for name, tensor in also.items() if name.startswith(prefix)}
            if part_name in numbers["also"]:
                part.load_state_dict(numbers["also"][part_name] | own)
        self._load_random(random)
        return numbers

    def _inner_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        parameters = self._parameters()
        targets = {}
        for full, data in saved.items():
            if not full.startswith("inner."):
                continue
            name = full.split(".", 2)[2]
            if name not in parameters:
                raise CheckpointError(f"the checkpoint has the inner optimizer's state of '{name}', the model has none")
            same = data.shape == tuple(parameters[name].shape) and data.shape
            targets[full] = torch.zeros_like(parameters[name], dtype=data.dtype).detach() if same else _empty(data)
        return targets

    def _load_inner(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Load through the optimizer's own load_state_dict, which moves each value to its device."""
        states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in numbers.items()}
        for full, tensor in tensors.items():
            _, key, name = full.split(".", 2)
            states.setdefault(name, {})[key] = tensor
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        order = [names[id(parameter)] for group in self.inner.param_groups for parameter in group["params"]]
        current = self.inner.state_dict()
        current["state"] = {index: states[name] for index, name in enumerate(order) if name in states}
        self.inner.load_state_dict(current)

    def _random_prefix(self, saved: Mapping[str, SavedTensor]) -> str:
        """Return the prefix of this rank's generators; if fewer ranks were saved, of rank r mod their number."""
        ranks = sorted({int(name.split(".")[1]) for name in saved if name.startswith("rng.")})
        return f"rng.{ranks[self.rank % len(ranks)]}." if ranks else "rng.none."

    def _load_random(self, states: Mapping[str, Tensor]) -> None:
        for name, state in states.items():
            if name.endswith(".cpu"):
                torch.set_rng_state(state)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(state)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint has of a model: all that is saved of it but frozen parameters, which its folder has."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _empty(data: SavedTensor) -> Tensor:
    return torch.zeros(data.shape, dtype=data.dtype)


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads one worker's state.

    All workers save after the same inner steps, at the end, and at a stop; always before the last rounds that end a run
    (`finish`), which an uninterrupted run would not have had. When another worker's stop cuts a round short, the last
    step is saved as an open one, without that round. A state that has merged such a round is not saved: the run then
    resumes from the checkpoint before.
    """

    config: RunConfig
    state: WorkerState
    checkpoints: CheckpointStore
    emit: Emit

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
        """Save the state now. An open step is not counted in the checkpoint's step: the same step may be saved complete
        later."""
        outer = self.state.mode.averager
        outer.settle()
        reason = outer.unsavable()
        if reason is None:
            tensors, numbers = self.state.collect()
            step = outer.inner_steps - open_step
            self.checkpoints.save(step, outer.sequence, tensors, numbers, warm_steps=self._warm_steps(), last=last)
        else:
            logger.info("no checkpoint of step %d: %s", outer.inner_steps, reason)
            self.emit(CheckpointSkippedEvent(step=outer.inner_steps, reason=reason))

    def _warm_steps(self) -> int:
        """Return how many steps the workers have taken together in a warm start."""
        if self.config.mode != "diloco" or self.checkpoints.owner.workers is None:
            return 0
        return min(self.state.mode.averager.inner_steps, self.config.sync.warm_start)

    def load(self, start: Start) -> dict[str, Any]:
        """Load the state of `start` and begin there; returns the fields of the event `resumed`."""
        checkpoint = start.checkpoint
        owner = self.checkpoints.owner
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
        """Return what the user should know of this start; worker 0 says what concerns all workers."""
        owner = self.checkpoints.owner
        checkpoint = start.checkpoint
        if checkpoint is None:
            return ["there is no checkpoint yet: the run starts again at its first step"] if owner.worker == 0 else []
        before = checkpoint.moment.workers
        notes = []
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
    """Return how much work is lost with a worker that is not started again, by its own checkpoint."""
    assert start.checkpoint is not None
    manifests = [
        checkpoint.manifests[0]
        for checkpoint in find_checkpoints(run_folder)[0]
        if checkpoint.worker == worker and checkpoint.moment == start.checkpoint.moment
    ]
    if not manifests:
        return "its inner steps since its last round are lost; no checkpoint of it here says how many"
    outer = manifests[-1].state["outer"]
    taken = manifests[-1].step - outer.get("jumped", 0)
    lost = taken - min((value for key, value in outer.items() if key.endswith(".merged_at")), default=taken)
    return f"its {lost} inner steps since its last round are lost" if lost else "none of its work is lost"
