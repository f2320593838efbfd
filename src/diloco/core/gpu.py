"""Whether the kernels can be used: Triton comes with torch for NVIDIA GPUs on Linux, and not everywhere else.

Without it the same bits are computed by tensor operations, in more passes over memory.
"""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def use_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and _has_triton()
