"""A model's tensors: which are averaged, which are only made equal at the start, and which stay a worker's own.

- Averaged by the outer optimizer: every trainable parameter, once (tied weights are one tensor).
- Averaged plainly: floating-point buffers that are saved with the model (batch-norm statistics).
- Made equal at the start: frozen parameters and all other saved buffers. Unsaved buffers (rotary tables) are computed.
- A worker's own: the inner optimizer's state.

A trainable parameter that the inner optimizer does not know would never move, and one that only the inner optimizer
knows would never be averaged: both are refused.

Names are the bare model's, whatever wraps it (DDP, torch.compile, activation checkpointing), so that workers that wrap
it differently still know each other's parameters.
"""

import sys
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError


@dataclass(frozen=True)
class ModelTensors:
    """A model's tensors by what happens to them; names are the model's own."""

    averaged: dict[str, Tensor]
    averaged_buffers: dict[str, Tensor]
    equal_at_start: dict[str, Tensor]
    sharded_modules: tuple[nn.Module, ...] = ()
    """The modules that FSDP2 has wrapped, which may hold gathered copies of parameters after a forward pass."""

    @property
    def all(self) -> dict[str, Tensor]:
        return {**self.averaged, **self.averaged_buffers, **self.equal_at_start}

    @cached_property
    def averaged_ids(self) -> frozenset[int]:
        """The ids of the averaged parameters' tensors, which live as long as this object."""
        return frozenset(id(tensor) for tensor in self.averaged.values())


def model_tensors(model: nn.Module, inner: torch.optim.Optimizer, *, send_frozen: bool = True) -> ModelTensors:
    """Sort the model's tensors; refuses parameters that would be forgotten. `send_frozen`: False if frozen parameters
    are the same on all workers already."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    sharded = _sharded_modules(model)
    for module in sharded:
        module.reshard()  # type: ignore[operator]
    parameters = {bare_name(name): p for name, p in model.named_parameters()}
    optimized = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    forgotten = [name for name, p in trainable.items() if id(p) not in optimized]
    if not optimized & {id(p) for p in parameters.values()}:
        raise ConfigError(
            "the inner optimizer has none of the model's parameters: it was built for another model, or the model's "
            "parameters were replaced since (by a copy, or by sharding). Build the inner optimizer from "
            "model.parameters() of the model that is given to DiLoCo"
        )
    if forgotten:
        raise ConfigError(
            f"trainable parameters that the inner optimizer does not have: {', '.join(forgotten)}. "
            "Give them to it, or freeze them with requires_grad_(False)"
        )
    known = {id(p) for p in parameters.values()}
    foreign = [
        tuple(p.shape)
        for group in inner.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    ]
    if foreign:
        raise ConfigError(
            f"the inner optimizer has parameters that are not in the model (shapes {foreign}): they would never be "
            "averaged. Register them in the model that is given to DiLoCo"
        )
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to train")
    saved = {bare_name(name) for name in model.state_dict(keep_vars=True)}
    buffers = {bare_name(name): buffer for name, buffer in model.named_buffers() if bare_name(name) in saved}
    means = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.numel()}
    rest = {name: buffer for name, buffer in buffers.items() if name not in means}
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad and send_frozen}
    return ModelTensors(dict(trainable), means, {**frozen, **rest}, sharded)


def bare_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def _sharded_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and a sharded model has imported it
    return () if fsdp is None else tuple(module for module in model.modules() if isinstance(module, fsdp.FSDPModule))
