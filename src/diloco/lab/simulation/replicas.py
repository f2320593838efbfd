"""k replicas of a model on one device: the interface, and the plain way to compute them, one after another.

DiLoCo sees k ordinary models with an inner optimizer each. `take_step` moves all of them by one inner step; the outer
steps are the product's own. `stacked.py` is the fast way for small models; both give the same up to rounding.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diloco.engines.worker_ranks import ALONE
from diloco.lab.simulation.batches import CorpusTokens
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from diloco.training.compute import Precision, prepare
from diloco.training.config.run import ComputeConfig, InnerConfig
from diloco.training.inner import inner_optimizer, learning_rate_schedule


@dataclass(frozen=True)
class Beginning:
    """The state that all replicas start from: parameters by name, and the inner optimizer's state by its own names and
    by parameter."""

    parameters: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """"exp_avg", "exp_avg_sq", "momentum_buffer": {parameter: tensor}; empty: fresh."""
    steps: int = 0
    """Steps that the inner optimizer has taken."""


@dataclass(frozen=True)
class ReplicaTask:
    """The model, the batches and the learning rates of the replicas, whichever way they are computed."""

    config: ModelConfig
    inner: InnerConfig
    text: CorpusTokens
    places: Tensor
    """The first tokens of the windows: [steps, k, B], int64, on the device."""
    rates: Tensor
    """The learning rate of each step, [steps], on the device."""
    masked: bool = False
    """Some steps are not taken by all replicas."""

    @property
    def length(self) -> int:
        return self.config.max_sequence_length

    @property
    def replicas(self) -> int:
        return self.places.shape[1]


def learning_rates(config: InnerConfig, first: int, count: int, total: int, device: torch.device) -> Tensor:
    """Compute the learning rates of steps `first` to `first + count` of a schedule over `total` steps."""
    schedule = learning_rate_schedule(torch.optim.SGD([torch.zeros(1)], lr=config.lr), config, total)
    [factor] = schedule.lr_lambdas
    return torch.tensor([config.lr * factor(first + step) for step in range(count)], device=device)


class Replicas(ABC):
    """k replicas of a model: the DiLoCo optimizer of worker i is built with `models[i]` and `inners[i]`."""

    models: list[nn.Module]
    inners: list[torch.optim.Optimizer]
    how: str
    losses: Tensor
    """Training losses, [steps, k]."""

    @abstractmethod
    def take_step(self, active: Sequence[bool] | None = None) -> None:
        """Take the next inner step of all replicas, or of the active ones; the others stay as they are."""

    @abstractmethod
    def memory(self) -> dict[str, Tensor]:
        """Return all tensors that a step changes, by name, without copying them."""

    @abstractmethod
    def load(self, saved: Mapping[str, Tensor], steps: int) -> None:
        """Go on after `steps` steps, with the contents that `memory` had then. Models and inner optimizers stay the
        same objects."""

    @abstractmethod
    def as_beginning(self) -> Beginning:
        """Return a copy of replica 0 and its inner optimizer's state."""


class Sequential(Replicas):
    """The product's own modules and inner optimizers, one replica after another; large models compiled."""

    def __init__(self, task: ReplicaTask, beginning: Beginning) -> None:
        self.task = task
        self.how = "sequential"
        self._step = 0
        self._steps_before = beginning.steps
        device = task.places.device
        self._precision = Precision("auto", device, ALONE)
        self.losses = torch.zeros(task.places.shape[:2], device=device)
        self.models = []
        self.inners = []
        for _ in range(task.replicas):
            with torch.device(device):
                model = NativeModel(task.config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(beginning.parameters[name])
            prepare(model, ComputeConfig(), device)
            inner = inner_optimizer(model, task.inner)
            self._load(model, inner, beginning)
            self.models.append(model)
            self.inners.append(inner)

    def _load(self, model: nn.Module, inner: torch.optim.Optimizer, beginning: Beginning) -> None:
        for name, parameter in model.named_parameters():
            state = {kind: by_name[name] for kind, by_name in beginning.state.items() if name in by_name}
            if state:
                inner.state[parameter] = {kind: value.to(parameter.device, copy=True) for kind, value in state.items()}
                if "exp_avg" in state:
                    inner.state[parameter]["step"] = torch.tensor(float(beginning.steps), device=parameter.device)

    def take_step(self, active: Sequence[bool] | None = None) -> None:
        step = self._step
        rate = float(self.task.rates[self._step])
        for worker, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
            if active is not None and not active[worker]:
                continue
            tokens = self.task.text.batch(self.task.places[step, worker], self.task.length)
            inner.zero_grad()
            with self._precision.autocast():
                loss: Tensor = model.loss(tokens[:, :-1], tokens[:, 1:])  # type: ignore[operator]
            loss.backward()  # type: ignore[no-untyped-call]
            if self.task.inner.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.task.inner.clip_norm)
            for group in inner.param_groups:
                group["lr"] = rate
            inner.step()
            self.losses[step, worker] = loss.detach()
        self._step += 1

    def memory(self) -> dict[str, Tensor]:
        tensors = {"losses": self.losses}
        for worker, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
            for name, parameter in model.named_parameters():
                state = {"parameters": parameter.detach()} | inner.state.get(parameter, {})
                tensors |= {f"{worker}/{kind}/{name}": tensor for kind, tensor in state.items()}
        return tensors

    def load(self, saved: Mapping[str, Tensor], steps: int) -> None:
        self.losses.copy_(saved["losses"])
        for worker, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
            kinds = {label.split("/")[1] for label in saved if label.startswith(f"{worker}/")} - {"parameters"}
            for name, parameter in model.named_parameters():
                parameter.detach().copy_(saved[f"{worker}/parameters/{name}"])
                label_by_kind = {kind: f"{worker}/{kind}/{name}" for kind in kinds}
                saved_by_kind = {kind: saved[label] for kind, label in label_by_kind.items() if label in saved}
                inner.state[parameter] = {kind: value.to(parameter.device) for kind, value in saved_by_kind.items()}
        self._step = steps

    def as_beginning(self) -> Beginning:
        model = self.models[0]
        inner = self.inners[0]
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            for kind, tensor in inner.state.get(parameter, {}).items():
                if kind != "step":
                    state.setdefault(kind, {})[name] = tensor.clone()
        return Beginning(parameters, state, self._steps_before + self._step)


def fresh(config: ModelConfig, seed: int, device: torch.device) -> Beginning:
    """Draw random weights from the seed, and leave torch's generator as it was."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = NativeModel(config)
    torch.set_rng_state(generator_state)
    return Beginning({name: parameter.detach().to(device) for name, parameter in model.named_parameters()})
