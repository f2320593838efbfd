"""How a worker computes its inner steps: in which precision, compiled, with activations recomputed instead of kept.

The precision is fp32, or bf16 or fp16 autocast; weights, gradient sums and anchors are always fp32. fp16 needs a loss
scale, since its range is small: torch's GradScaler, which belongs to the inner step alone and is a worker's own
(OpenDiLoCo, arXiv 2407.07852). A step whose gradients overflow is skipped, and counts as a step in the schedule of
rounds. A worker of several ranks skips on all of them or on none.

Compiling and recomputing replace a module's `forward` and nothing else: parameters keep their names, and what acts on a
call of a module (FSDP's gathering, hooks) stays outside. Both are for training: without gradients (evaluation,
generation), where shapes vary, the module's own `forward` runs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diloco.core.gpu import has_triton
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError
from diloco.models.base import LanguageModel
from diloco.training.config.run import ComputeConfig

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

logger = logging.getLogger(__name__)

WORTH_COMPILING = 50_000_000
"""With this many parameters or more, compiling pays for its half a minute; the default of compute.compile."""
SHORT_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_name(name: str, device: torch.device) -> str:
    """Return what `auto` means on this device; any other name unchanged."""
    if name != "auto":
        return name
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


class Precision:
    """One worker's precision, with its loss scale if it has one."""

    def __init__(self, name: str, device: torch.device, ranks: WorkerRanks) -> None:
        """`name`: fp32, bf16, fp16, or auto, which is bf16 on a CUDA device that has it and fp32 elsewhere."""
        on_gpu = device.type == "cuda"
        if name == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(f"compute.precision = bf16, but {torch.cuda.get_device_name(device)} has none: use fp16")
        self.name = name = precision_name(name, device)
        self.dtype: torch.dtype | None = SHORT_TYPES.get(name)
        self._device = device
        self._ranks = ranks
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    @property
    def sharding_policy(self) -> "MixedPrecisionPolicy | None":
        """FSDP gathers parameters in this precision (bf16 halves the bytes); gradients are summed in fp32."""
        if self.name != "bf16" or self._ranks.count == 1:
            return None
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of every forward pass."""
        return nullcontext() if self.dtype is None else torch.autocast(self._device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the loss scale, before they are clipped."""
        if self._scaler is not None:
            if self._ranks.count > 1:
                self._agree(p.grad for group in optimizer.param_groups for p in group["params"])
            self._scaler.unscale_(optimizer)

    def _agree(self, gradients: Iterable[Tensor | None]) -> None:
        """Make an infinite gradient of one rank infinite on all ranks of the worker, so that all skip the step."""
        local = [_local(gradient) for gradient in gradients if gradient is not None]
        local = [gradient for gradient in local if gradient.numel()]
        infinite = not all(bool(gradient.isfinite().all()) for gradient in local)
        if self._ranks.any(infinite) and local:
            local[0].fill_(float("inf"))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, or none if the gradients were not finite (DiLoCo counts skipped steps)."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    @property
    def loss_scale(self) -> float | None:
        return None if self._scaler is None else self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale's state, which is numbers only; empty without one."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loss scale, unless the run is resumed in another precision: it then starts at its default."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a gradient that is spread over a worker's ranks."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: every item of a list of modules."""
    return [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]


def prepare(model: LanguageModel, config: ComputeConfig, device: torch.device, *, sharded: bool = False) -> bool:
    """Change how `model` computes, in place; `sharded`: FSDP gathers each block when it is called.

    Returns whether the model is compiled, which its first step waits for.
    """
    if device.type == "cuda" and not has_triton():
        logger.warning("Triton is not installed: outer steps and the loss take more passes over the GPU's memory")
    if config.checkpoint_activations:
        model_blocks = blocks(model)
        if not model_blocks:
            raise ConfigError(
                "compute.checkpoint_activations recomputes block by block, and this model has no list of blocks: "
                "leave it out"
            )
        for block in model_blocks:
            _in_training(block, _recomputed(block.forward))
    wanted = config.compile
    if wanted is None:
        wanted = device.type == "cuda" and sum(p.numel() for p in model.parameters()) >= WORTH_COMPILING
    if wanted:
        for part in _compiled_parts(model, sharded):
            _in_training(part, torch.compile(part.forward, dynamic=False))
    return wanted


def _compiled_parts(model: LanguageModel, sharded: bool) -> Iterator[nn.Module]:
    """Return the whole body; the blocks one by one if the model is sharded, since gathering cannot be compiled."""
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


class PlacedModel:
    """A model on this rank: whole, or its part among several ranks of a worker (sharding.py).

    `model` has the parameters to train, on the device.
    """

    sharded = False
    """Whether parameters are gathered block by block."""

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self.model = model.to(device)

    def loss(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor:
        """Return the loss of this rank's rows, for training; all ranks call it as often."""
        return self.model.loss(tokens, targets, learnt)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of forward and backward: gradients travel with the last one only."""
        return nullcontext()

    def whole(self) -> LanguageModel | None:
        """Return the model to save and to write with, on the first rank; None on the others. Collective."""
        return self.model
