"""The parts that block-wise codecs share: rows in batches that stay in cache, packed codes, a scale for each block.

A part is cut into blocks of consecutive values, each with an fp32 scale of its own. Layout of a part: the codes, then
the scales of its blocks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from diloco.codecs.encoded import scratch
from diloco.core.fragments import PART_QUANTUM

_BATCH_ELEMENTS = 1 << 19  # of 2 MiB, as spans have: fewer cost more calls than they save in a cache
INT8_BLOCK, INT4_BLOCK = 256, 128
_LARGEST = (1 - 2.0**-23) * torch.finfo(torch.float32).max
INT8_LARGEST_SCALE = _LARGEST / 127  # 127 times it is still finite in fp32
INT4_LARGEST_SCALE = _LARGEST / 7
SMALLEST_SCALE = 2.0**-126  # the smallest fp32 number of full precision; x / scale then has it too

assert PART_QUANTUM % (2 * INT8_BLOCK) == 0 and PART_QUANTUM % (2 * INT4_BLOCK) == 0


def batches(values: Tensor) -> Iterator[slice]:
    """Cut rows into batches: few at a time on the CPU, all of them elsewhere."""
    rows, elements = values.shape
    step = max(1, _BATCH_ELEMENTS // elements) if values.device.type == "cpu" else max(1, rows)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def divided(values: Tensor, by: float) -> Tensor:
    """Compute values / by, exactly rounded: by a plain number a GPU would multiply with its inverse."""
    return values / torch.full_like(values, by)


def largest_of(blocks: Tensor) -> Tensor:
    """Return max|block| of [..., size] as [..., 1]. Reading twice costs less than writing |x|."""
    return torch.maximum(blocks.amax(dim=-1, keepdim=True), blocks.amin(dim=-1, keepdim=True).neg_()).abs_()


def whole_numbers(use: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scratch memory (encoded.scratch) of the shape of `like`, for integers of 1 or 2 bytes."""
    block = scratch(use, (-(-like.numel() * dtype.itemsize // 4),), like.device)
    return block.view(dtype)[: like.numel()].view(like.shape)


def scales_of(data: Tensor, code_bytes: int) -> Tensor:
    """View the scales of encoded parts [rows, part_bytes] as [rows, blocks] fp32, to read or to write."""
    return data[:, code_bytes:].view(torch.float32)
