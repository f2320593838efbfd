"""How a worker computes its inner steps: compiled, and with activations recomputed instead of kept.

Both replace a module's `forward` and nothing else: parameters keep their names, and what acts on a call of a module
(FSDP's gathering, hooks) stays outside. Both are for training: without gradients (evaluation, generation), where shapes
vary, the module's own `forward` runs.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diloco.core.gpu import has_triton
from diloco.errors import ConfigError
from diloco.models.base import LanguageModel
from diloco.training.config.run import ComputeConfig

logger = logging.getLogger(__name__)

WORTH_COMPILING = 50_000_000
"""With this many parameters or more, compiling pays for its half a minute; the default of compute.compile."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: every item of a list of modules."""
    return [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]


def prepare(model: LanguageModel, config: ComputeConfig, device: torch.device, *, sharded: bool = False) -> bool:
    """Change how `model` computes, in place; `sharded`: FSDP gathers each block when it is called.

    Returns whether the model is compiled, which its first step waits for.
    """
    if device.type == "cuda" and not has_triton():
        logger.warning("Triton is not installed: outer steps and the loss take more passes over the GPU's memory")
    if config.checkpoint_activations:
        found = blocks(model)
        if not found:
            raise ConfigError(
                "compute.checkpoint_activations recomputes block by block, and this model has no list of blocks: "
                "leave it out"
            )
        for block in found:
            _in_training(block, _recomputed(block.forward))
    wanted = config.compile
    if wanted is None:
        wanted = device.type == "cuda" and sum(p.numel() for p in model.parameters()) >= WORTH_COMPILING
    if wanted:
        for part in _compiled_parts(model, sharded):
            _in_training(part, torch.compile(part.forward, dynamic=False))
    return wanted


def _compiled_parts(model: LanguageModel, sharded: bool) -> Iterator[nn.Module]:
    """The whole body; the blocks one by one if the model is sharded, since gathering cannot be compiled."""
    yield from (blocks(model) if sharded else [model.body])


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*inputs: Any, **more: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **more)

    return again


def _in_training(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Use `forward` while gradients are enabled, the module's own otherwise."""
    plain = module.forward

    def either(*inputs: Any, **more: Any) -> Any:
        return (forward if torch.is_grad_enabled() else plain)(*inputs, **more)

    module.forward = either
