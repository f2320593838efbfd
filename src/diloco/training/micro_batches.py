"""The micro-batches of an inner step: in how many it is computed, and the windows that each has.

training.batch_size is what counts, and the result is the same up to rounding. Where training.accumulation is left open,
a step is one micro-batch on the CPU. On a GPU it has the largest micro-batches that fit: those that the estimate of
memory (sizes/) calls for are tried with a forward and backward pass before training, then larger ones for as long as
they fit, or smaller ones until they do. What counts is what such a pass holds, not what happens to be free while other
processes start, so that a run makes the same choice again on the same GPU. Among several ranks of a worker, which must
not fail alone, the estimate decides without a trial.

Without a loss mask every target is learnt and the loss is their mean. With one (data.format chat or completion) the
loss is the mean over the learnt targets of the whole batch, whichever micro-batch or rank has them: each micro-batch's
own mean is scaled by its part of them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from diloco.data.order import Int64
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError, DiLoCoError
from diloco.models.base import LanguageModel
from diloco.training.config.run import RunConfig
from diloco.training.sizes.memory import ACTIVATIONS, Placement, process_memory
from diloco.training.sizes.room import size_text

logger = logging.getLogger(__name__)

USABLE = 0.92
"""The share of a GPU's memory that is planned with: allocators leave holes, and libraries have memory of their own."""


class Loss(Protocol):
    """The loss of a model: mean cross entropy of the targets, or of those at the flat indices `learnt`."""

    def __call__(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor: ...


class MicroBatch(NamedTuple):
    """The rows of an inner step that this rank computes at a time."""

    inputs: Tensor
    """(B, T), int64; targets likewise."""
    targets: Tensor
    tokens: int
    """Targets that are learnt."""
    learnt: Tensor | None = None
    """Their indices in the flattened targets; None: all."""
    scale: float = 1.0
    """Tokens that are learnt here, relative to the mean of all micro-batches of the step."""

    @classmethod
    def of(
        cls, windows: Tensor, device: torch.device, *, masked: bool = False, mean_tokens: float | None = None
    ) -> "MicroBatch":
        """Make a micro-batch of `windows` (B, T + 1). `masked`: a token t that is not learnt is −1 − t."""
        if not masked:
            windows = windows.to(device)
            return cls(windows[:, :-1], windows[:, 1:], windows[:, 1:].numel())
        inputs = windows[:, :-1]
        targets = windows[:, 1:]
        learnt = (targets.flatten() >= 0).nonzero().squeeze(1)
        tokens = len(learnt)
        scale = 1.0 if mean_tokens is None else tokens / max(mean_tokens, 1e-9)
        if not tokens:  # the model computes a loss all the same, since other ranks may wait for this one
            learnt = torch.arange(targets.numel())
            scale = 0.0
        return cls(_numbers(inputs).to(device), _numbers(targets).to(device), tokens, learnt.to(device), scale)

    def loss(self, model_loss: Loss) -> Tensor:
        """Return the part of the step's loss that these windows are, times the number of micro-batches."""
        if self.learnt is None:
            return model_loss(self.inputs, self.targets)
        return model_loss(self.inputs, self.targets, self.learnt) * self.scale


def _numbers(windows: Tensor) -> Tensor:
    """Return the numbers of tokens, learnt or not."""
    return torch.where(windows < 0, ~windows, windows)


def micro_batches(
    windows: Int64, ranks: WorkerRanks, parts: int, device: torch.device, *, masked: bool
) -> tuple[list[MicroBatch], int | None]:
    """Return this rank's rows of a worker's windows in `parts`, and with a loss mask the tokens that the worker
    learns."""
    whole = torch.from_numpy(windows)
    own = whole.chunk(ranks.count)[ranks.rank]
    if not masked:
        return [MicroBatch.of(part, device) for part in own.to(device).chunk(parts)], None
    learnt = int((whole[:, 1:] >= 0).sum())
    mean = learnt / (ranks.count * parts)
    return [MicroBatch.of(part, device, masked=True, mean_tokens=mean) for part in own.chunk(parts)], learnt


def fewest_micro_batches(
    config: RunConfig,
    placement: Placement,
    model: LanguageModel,
    loss: Callable[[Tensor, Tensor], Tensor],
    vocab_size: int,
    device: torch.device,
    budget: float,
) -> int:
    """Return how many micro-batches of a step fit `budget` bytes of a GPU: by an estimate, and for a worker of one rank
    by trials from there on."""
    counts = choices(config.training.batch_size, placement.ranks)
    activations, gradients, rest = _estimated_memory(config, placement, model, vocab_size, device)
    start = estimated(counts, activations, gradients + rest, budget)
    if placement.ranks > 1:
        return start

    def needed(count: int) -> int | None:
        rows = config.training.batch_size // count
        used = trial_bytes(model, loss, rows, config.data.sequence_length, device)
        return None if used is None else rest + used

    return fewest_that_fit(counts, start, needed, gradients + rest, budget)


def _estimated_memory(
    config: RunConfig, placement: Placement, model: LanguageModel, vocab_size: int, device: torch.device
) -> tuple[int, int, int]:
    """Return the bytes on the GPU: activations of a whole batch, gradients, and all that is there besides."""
    try:
        _, memory = process_memory(config, model, placement, 0, vocab_size)
    except (DiLoCoError, RuntimeError, TypeError, AttributeError) as error:  # of another library's model
        if placement.ranks > 1:
            raise ConfigError(
                f"the memory of this model's steps cannot be estimated ({error}), and several ranks do not try: "
                "say in how many micro-batches a step is computed, with --training.accumulation"
            ) from error
        logger.warning("the memory of a step cannot be estimated, so trials begin with a whole batch: %s", error)
        gradients = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        return 0, gradients, torch.cuda.memory_allocated(device) + 2 * gradients
    activations = memory[ACTIVATIONS]
    gradients = memory["gradients"]
    return activations, gradients, sum(memory.values()) - activations - gradients


def choices(batch_size: int, ranks: int = 1) -> list[int]:
    """Return the numbers of micro-batches that cut a rank's rows evenly, from one to a row each."""
    rows = batch_size // ranks
    return [count for count in range(1, rows + 1) if rows % count == 0]


def estimated(counts: Sequence[int], activations: int, fixed: int, budget: float) -> int:
    """Return the fewest micro-batches with which a step fits, by an estimate; the most if none does.

    `activations`: bytes with one micro-batch; `fixed`: all other bytes.
    """
    return next((count for count in counts if fixed + activations / count <= budget), counts[-1])


def fewest_that_fit(
    counts: Sequence[int], start: int, needed: Callable[[int], int | None], fixed: int, budget: float
) -> int:
    """Return the fewest micro-batches with which a step fits, tried from `start` on.

    `needed`: the bytes of a whole step with that many, measured; None if memory ran out. `fixed`: those that do not
    depend on it, by which a larger micro-batch is left untried if it is bound to fail.
    """
    at = counts.index(start)
    used = needed(counts[at])
    if used is not None and used <= budget:
        while at > 0 and fixed + (used - fixed) * counts[at] / counts[at - 1] <= budget:
            larger = needed(counts[at - 1])
            if larger is None or larger > budget:
                break
            used = larger
            at = at - 1
        return counts[at]
    for count in counts[at + 1 :]:
        used = needed(count)
        if used is not None and used <= budget:
            return count
    raise ConfigError(
        f"a step does not fit the GPU's memory ({size_text(budget)} for this process) even with one sequence at a "
        "time: try --compute.checkpoint_activations true, --sync.offload true, or a shorter --data.sequence_length"
    )


def budget_bytes(device: torch.device, sharing: int) -> float:
    """Return the memory of a GPU for one of `sharing` processes."""
    return USABLE * torch.cuda.get_device_properties(device).total_memory / sharing


def trial_bytes(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], rows: int, length: int, device: torch.device
) -> int | None:
    """Return what a forward and backward pass over that many rows adds to the memory in use; None if there is too
    little.

    Leaves no gradients behind, and torch's generators as they were.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with torch.random.fork_rng(devices=[device]):
            tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
            loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
