"""Whether Triton is here: torch brings it for NVIDIA GPUs on Linux.

Without it tensor operations compute the same bits, in more passes over memory.
"""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
