"""A copy of a worker's tensors that is written while training goes on.

tensors on the CPU   are copied there
on a GPU             are copied within its memory if that leaves as much free again: it takes milliseconds, and the
                     writing thread fetches the copies on a stream of its own
on a full GPU        are copied to pinned CPU memory, which is kept for the next time: training waits as long as the
                     transfer takes, and no longer
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diloco.outer.tensors.tensor_pieces import TensorPieces

logger = logging.getLogger(__name__)


def take_snapshot(tensors: Mapping[str, TensorPieces]) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
    """The copies, and what to call before reading them, in any thread. The tensors may change from now on."""
    live = [piece.tensor.detach() for tensor in tensors.values() for piece in tensor.pieces]
    copies, wait = _copy_all(live)
    rest = iter(copies)
    return {
        name: replace(tensor, pieces=tuple(replace(piece, tensor=next(rest)) for piece in tensor.pieces))
        for name, tensor in tensors.items()
    }, wait


def _copy_all(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_gpu:
        return [tensor.to("cpu", copy=True) for tensor in tensors], lambda: None
    room = _has_room(on_gpu)
    try:
        copies = [_copy(tensor, within_gpu=room) for tensor in tensors]
    except torch.OutOfMemoryError:
        logger.info("no room on the GPU for a copy of the state: it is copied to the CPU")
        copies = [_copy(tensor, within_gpu=False) for tensor in tensors]
    done: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(on_gpu[0].device))
    return copies, done.synchronize


def _has_room(tensors: Sequence[Tensor]) -> bool:
    """Whether a copy of all leaves as much free again: training may need more at times."""
    device = tensors[0].device
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached >= 2 * needed


def _copy(tensor: Tensor, *, within_gpu: bool) -> Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    if within_gpu:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
