"""The statements of outer_step.py as GPU kernels (Triton), each one pass over memory.

On a GPU an outer step costs what its memory traffic costs. Written as tensor operations, Nesterov and the copy back
read and write every element twenty times; here it is six (θ_i, anchor and momentum, each read and written once), or
seven with the mean outer gradient. A worker's parameters are many tensors and the anchor is one: a table of
`entries` (address of some elements of θ_i, their place in the fragment, how many) lets one launch go through all.

The results are those of the tensor operations bit for bit: multiply-add is fused exactly where torch's own kernels
fuse it, and nowhere else. So a worker with these kernels and one without hold the same anchors. Only fp32 parameters
on a GPU come here; `fits` says whether a fragment does. Imported only where there is a GPU, since Triton may be absent
elsewhere.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_KINDS = {"sgd": 0, "sgdm": 1, "nesterov": 2}


@triton.jit
def _entry(table, number, ALIGNED: tl.constexpr):
    row = table + number * 3
    theta = tl.load(row).to(tl.pointer_type(tl.float32))
    start, count = tl.load(row + 1), tl.load(row + 2)
    if ALIGNED:  # lets the compiler load four elements at a time
        theta, start, count = tl.multiple_of(theta, 16), tl.multiple_of(start, 4), tl.multiple_of(count, 4)
    return theta, start, count


@triton.jit
def _gradient_kernel(table, first, anchor, delta, offset, squares, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """delta ← anchor − θ_i, and the sum of its squares, an entry a program."""
    theta, start, count = _entry(table, first + tl.program_id(0), ALIGNED)
    at = tl.arange(0, BLOCK)
    mask = at < count
    difference = tl.load(anchor + start + at, mask, 0.0) - tl.load(theta + at, mask, 0.0)
    tl.store(delta + (start - offset) + at, difference, mask)
    tl.store(squares + tl.program_id(0), tl.sum(difference * difference))


@triton.jit
def _step_kernel(
    table, first, anchor, momentum, delta, offset, squares, lr, mu, mixing,
    KIND: tl.constexpr, ALONE: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """OuterOpt on the anchor, and θ_i after it. ALONE: Δ is this worker's own, anchor − θ_i."""
    theta, start, count = _entry(table, first + tl.program_id(0), ALIGNED)
    at = tl.arange(0, BLOCK)
    mask = at < count
    a = tl.load(anchor + start + at, mask, 0.0)
    if ALONE:
        d = a - tl.load(theta + at, mask, 0.0)
    else:
        d = tl.load(delta + (start - offset) + at, mask, 0.0)
    tl.store(squares + tl.program_id(0), tl.sum(d * d))
    if KIND == 0:
        a = tl.fma(-lr, d, a)
    else:
        b = tl.load(momentum + start + at, mask, 0.0) * mu + d
        tl.store(momentum + start + at, b, mask)
        if KIND == 2:
            b = tl.fma(mu, b, d)
        a = tl.fma(-lr, b, a)
    tl.store(anchor + start + at, a, mask)
    if MIX:  # torch.lerp's two branches
        own = tl.load(theta + at, mask, 0.0)
        weight = 1.0 - mixing
        near = tl.fma(weight, a - own, own)
        far = tl.fma(-(a - own), 1.0 - weight, a)
        a = tl.where(weight < 0.5, near, far)
    tl.store(theta + at, a, mask)


class Entries:
    """The table of a fragment's elements: where θ_i's lie, and which place they have in the fragment."""

    def __init__(self, tensors: Sequence[Tensor], grid: int) -> None:
        """No entry crosses a multiple of `grid`, so that whole parts are whole entries."""
        self.block = min(_BLOCK, grid)
        rows: list[tuple[int, int, int]] = []
        begin = 0
        for tensor in tensors:
            end = begin + tensor.numel()
            cuts = [begin, *range((begin // self.block + 1) * self.block, end, self.block), end]
            address = tensor.data_ptr()
            rows += [(address + (a - begin) * 4, a, b - a) for a, b in pairwise(cuts)]
            begin = end
        self.starts = [row[1] for row in rows]
        self.aligned = all(row[0] % 16 == 0 and row[1] % 4 == 0 and row[2] % 4 == 0 for row in rows)
        self.table = torch.tensor(rows, dtype=torch.int64).to(tensors[0].device)
        self.squares = torch.empty(len(rows), device=tensors[0].device)
