"""Memory for what is computed on the way: on a CPU, one block for each use and thread, taken again and again.

An allocator gives blocks of this size back to the system and faults them in anew, which costs more than the
arithmetic done in them. Each thread has its own, because rounds are reduced beside training, and because local
workers are threads that decode the same mean.
"""

import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.core.fragments import span_elements

_kept = threading.local()


def scratch(use: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Contiguous fp32 of any content. This thread's next call for the same `use` may return the same memory."""
    numel = torch.Size(shape).numel()
    if device.type != "cpu" or numel > span_elements(device):
        return torch.empty(shape, device=device)
    block: Tensor | None = getattr(_kept, use, None)
    if block is None:
        # A mapping of its own: in the heap it would lie where gradients come and go, and tear that space apart.
        block = torch.frombuffer(mmap.mmap(-1, 4 * span_elements(device)), dtype=torch.float32)
        setattr(_kept, use, block)
    return block[:numel].view(shape)
