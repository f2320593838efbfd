"""A model on several ranks of one worker: sharded by FSDP2, or replicated by DDP.

FSDP2 keeps 1/R of parameters, gradients and optimizer state on each rank and gathers a block at a time; DDP keeps all
on every rank. Either way gradients are averaged over the worker's ranks, each of which has its rows of the batch.
Master weights are fp32; `policy` is what FSDP2 computes and reduces in.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.engines.worker_ranks import WorkerRanks
from diloco.models.base import LanguageModel
from diloco.training.compute import PlacedModel, blocks

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class ShardedModel(PlacedModel):
    """A model of which each rank has a part (FSDP2)."""

    sharded = True

    def __init__(
        self, model: LanguageModel, ranks: WorkerRanks, device: torch.device, policy: "MixedPrecisionPolicy | None"
    ) -> None:
        self._shell = _without_parameters(model) if ranks.rank == 0 else None
        shard(model, ranks, device, policy)
        self.model = model

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]  # a method that FSDP2 has added
        return nullcontext()

    @torch.no_grad()
    def whole(self) -> LanguageModel | None:
        """Gather one tensor after another, so that no rank but the first ever holds more."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after an evaluation the outermost is still gathered
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            full: Tensor = parameter.full_tensor()  # type: ignore[attr-defined]
            if self._shell is not None:
                tensors[name] = full.to("cpu", copy=True)
        if self._shell is None:
            return None
        return _filled(copy.deepcopy(self._shell), tensors, dict(self.model.named_buffers()))


def shard(
    model: nn.Module, ranks: WorkerRanks, device: torch.device, policy: "MixedPrecisionPolicy | None" = None
) -> None:
    """Shard a model by FSDP2 over a worker's ranks: every item of a list of modules (a block) by itself, then what is
    left."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = ranks.mesh(device.type)
    policy = policy or MixedPrecisionPolicy()
    for block in reversed(blocks(model)):  # a list within a block comes before it
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class ReplicatedModel(PlacedModel):
    """A model of which each rank has a copy (DDP)."""

    def __init__(self, model: LanguageModel, ranks: WorkerRanks, device: torch.device) -> None:
        self.model = model.to(device)
        self._first = ranks.rank == 0
        self._replicated = DistributedDataParallel(_Loss(model), process_group=ranks.group)

    def loss(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor:
        loss: Tensor = self._replicated(tokens, targets, learnt)
        return loss

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self._replicated.no_sync():
            yield

    def whole(self) -> LanguageModel | None:
        return self.model if self._first else None


class _Loss(nn.Module):
    """The loss of a model as a module, since DDP acts on calls of a module."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None) -> Tensor:
        return self.model.loss(tokens, targets, learnt)


def _without_parameters(model: LanguageModel) -> LanguageModel:
    """Return a copy of everything but the parameters' values; parameters that are one stay one."""
    placeholders = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo=placeholders)


@torch.no_grad()
def _filled(shell: LanguageModel, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> LanguageModel:
    values = {id(p): nn.Parameter(parameters[name], p.requires_grad) for name, p in shell.named_parameters()}
    for module in shell.modules():
        for name, placeholder in module._parameters.items():
            if placeholder is not None:
                module._parameters[name] = values[id(placeholder)]
    for name, buffer in shell.named_buffers():
        buffer.copy_(buffers[name])
    return shell.eval()
