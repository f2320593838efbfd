"""Whether the Triton kernels can be used: torch brings Triton for NVIDIA GPUs on Linux.

Without it tensor operations compute the same bits, in more passes over memory.
"""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def use_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and _has_triton()
