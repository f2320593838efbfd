"""Memory for intermediate results: on a CPU, one block for each use and thread, used again and again.

The allocator would return blocks of this size to the system and fault them in again, which costs more than the
arithmetic done in them. Each thread has its own blocks, because rounds are reduced beside training, and because local
workers are threads that decode the same mean.
"""

import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.core.fragments import span_elements

_blocks = threading.local()


def scratch(use: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Contiguous fp32 of any content. This thread's next call for the same `use` may return the same memory."""
    numel = torch.Size(shape).numel()
    if device.type != "cpu" or numel > span_elements(device):
        return torch.empty(shape, device=device)
    block: Tensor | None = getattr(_blocks, use, None)
    if block is None:
        # A separate mapping: inside the heap it would fragment the space where gradients are allocated and freed.
        block = torch.frombuffer(mmap.mmap(-1, 4 * span_elements(device)), dtype=torch.float32)
        setattr(_blocks, use, block)
    return block[:numel].view(shape)
