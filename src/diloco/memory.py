"""Large CPU memory: each block in a mapping of its own, of huge pages where the system has them.

With pages of 4 KiB a core reads memory at half its speed, and new memory costs ten times as much. Nothing here changes
a value: where the system has no huge pages, or another C library, only the time and the memory are different.
"""

import ctypes
import mmap
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

LARGE_BYTES = 1 << 22
_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25  # of Linux 6.1; Python has no name for it


def mapped(num_bytes: int) -> Tensor:
    """Return uint8 zeros, which go back to the system as a whole when they are freed."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that has no huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def blank(num_bytes: int) -> memoryview:
    """Return memory of any content: a bytearray would first write zeros, in the thread that asks for it."""
    memory = torch.empty(num_bytes, dtype=torch.uint8) if num_bytes < LARGE_BYTES else mapped(num_bytes)
    view: memoryview = memory.numpy().data
    return view


def return_free_memory() -> None:
    """Give the system what malloc keeps in its holes: up to half a copy of the model, as gradients come and go."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def zeros(numel: int, device: torch.device) -> Tensor:
    """Return a flat fp32 tensor of zeros; a large one on the CPU is in huge pages."""
    if device.type != "cpu" or 4 * numel < LARGE_BYTES:
        return torch.zeros(numel, device=device)
    return mapped(4 * numel).view(torch.float32)


def move_to_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Let huge pages take the place of small ones wherever tensors fill most of one.

    Addresses and values stay, and memory that has no huge page to move to stays as it is. Slow, as it copies: once.
    """
    filled: Counter[int] = Counter()
    for tensor in tensors:
        if tensor.device.type == "cpu":
            start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            for page in range(start // _HUGE_PAGE * _HUGE_PAGE, stop, _HUGE_PAGE):
                filled[page] += min(stop, page + _HUGE_PAGE) - max(start, page)
    for page, num_bytes in filled.items():
        if num_bytes > _HUGE_PAGE // 2:
            _collapse(page)


def _collapse(page: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
