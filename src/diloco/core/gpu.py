"""Whether Triton is here: torch brings it for NVIDIA GPUs on Linux.

Without it tensor operations compute the same bits, in more passes over memory.
"""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def takes_kernels(*tensors: "Tensor") -> bool:
    """Whether Triton kernels can work on all of these."""
    return all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors) and has_triton()
