"""The statements of outer_step.py as GPU kernels (Triton), each one pass over memory.

On a GPU an outer step costs what its memory traffic costs. As tensor operations, the outer gradient, Nesterov and the
copy back read or write every element some twenty times. Here the outer gradient is three accesses, and the step six
(anchor and momentum read and written, Δ read, θ_i written). A worker's parameters are many tensors and the anchor is
one: a table of `entries` (address of some elements of θ_i, their offset in the fragment, their number) lets one launch
process all.

The results are those of the tensor operations bit for bit: multiply-add is fused exactly where torch's own kernels
fuse it, and nowhere else. So a worker with these kernels and one without hold the same anchors. Only fp32 parameters
on a GPU come here. Imported only where there is a GPU, since Triton may be absent elsewhere.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from diloco.core.outer_optimizers import SGD, Nesterov, OuterOptimizer, SGDMomentum

_BLOCK = 4096
_ROWS = 8
_KINDS: dict[type[OuterOptimizer], int] = {SGD: 0, SGDMomentum: 1, Nesterov: 2}


@triton.jit
def entry(table, number, ALIGNED: tl.constexpr):
    row = table + number * 3
    theta = tl.load(row).to(tl.pointer_type(tl.float32))
    start = tl.load(row + 1)
    count = tl.load(row + 2)
    if ALIGNED:  # lets the compiler load four elements at a time
        theta = tl.multiple_of(theta, 16)
        start = tl.multiple_of(start, 4)
        count = tl.multiple_of(count, 4)
    return theta, start, count


@triton.jit
def _gradient_kernel(table, first, offset, anchor, delta, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """delta ← anchor − θ_i, an entry a program; both begin at element `offset` of the fragment."""
    theta, start, count = entry(table, first + tl.program_id(0), ALIGNED)
    at = tl.arange(0, BLOCK)
    mask = at < count
    place = start - offset + at
    tl.store(delta + place, tl.load(anchor + place, mask, 0.0) - tl.load(theta + at, mask, 0.0), mask)


@triton.jit
def anchor_after(anchor, momentum, d, mask, lr, mu, KIND: tl.constexpr):
    """Return the anchor after OuterOpt along `d`; writes the momentum."""
    a = tl.load(anchor, mask, 0.0)
    b = d
    if KIND > 0:
        b = tl.load(momentum, mask, 0.0) * mu + d
        tl.store(momentum, b, mask)
        if KIND == 2:
            b = tl.fma(mu, b, d)
    return tl.fma(-lr, b, a)


@triton.jit
def theta_after(theta, a, mask, weight, MIX: tl.constexpr):
    """Return θ_i after the anchor's step to `a`."""
    if MIX:  # torch.lerp's two branches
        own = tl.load(theta, mask, 0.0)
        near = tl.fma(weight, a - own, own)
        far = tl.fma(-(a - own), 1.0 - weight, a)
        a = tl.where(weight < 0.5, near, far)
    return a


@triton.jit
def _step_kernel(
    table, first, offset, anchor, momentum, delta, lr, mu, weight,
    KIND: tl.constexpr, ALONE: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Let the anchor take the outer step, and θ_i follow it. ALONE: Δ is this worker's own, anchor − θ_i."""
    theta, start, count = entry(table, first + tl.program_id(0), ALIGNED)
    at = tl.arange(0, BLOCK)
    mask = at < count
    place = start - offset + at
    if ALONE:
        d = tl.load(anchor + place, mask, 0.0) - tl.load(theta + at, mask, 0.0)
    else:
        d = tl.load(delta + place, mask, 0.0)
    a = anchor_after(anchor + place, momentum + place, d, mask, lr, mu, KIND)
    tl.store(anchor + place, a, mask)
    tl.store(theta + at, theta_after(theta + at, a, mask, weight, MIX), mask)


@triton.jit
def _row_sum_kernel(words, columns, sums, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)[None, :]
    products = tl.load(words + row[:, None] * WIDTH + at, row[:, None] < rows, 0) * tl.load(columns + at)
    tl.store(sums + row, tl.sum(products, 1), row < rows)


def weighted_row_sums(flat: Tensor, columns: Tensor) -> Tensor:
    """Sum each row's 64-bit words times `columns`; `flat` is whole rows."""
    width = columns.numel()
    words = flat.view(torch.int64)
    sums = torch.empty(words.numel() // width, dtype=torch.int64, device=flat.device)
    _row_sum_kernel[(triton.cdiv(sums.numel(), _ROWS),)](words, columns, sums, sums.numel(), WIDTH=width, ROWS=_ROWS)
    return sums


def numbers_of(outer: OuterOptimizer) -> tuple[float, float]:
    """Return the learning rate and momentum of an outer optimizer that the kernels know."""
    assert isinstance(outer, SGD | SGDMomentum | Nesterov)
    return outer.lr, 0.0 if isinstance(outer, SGD) else outer.momentum


def kind_of(outer: OuterOptimizer) -> int:
    """Return the number by which the kernels know an outer optimizer."""
    return _KINDS[type(outer)]


class Kernels:
    """The kernels for one fragment's tensors, by address; build it anew when `moved` is true."""

    def __init__(self, tensors: Sequence[Tensor], part_elements: int) -> None:
        """Cut the tensors into entries. None crosses a multiple of the block, so a span, whole parts, is whole
        entries."""
        self._tensors = tensors
        self._part_elements = part_elements
        self._block = _BLOCK if part_elements % _BLOCK == 0 else 1024
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        rows: list[tuple[int, int, int]] = []
        begin = 0
        for tensor, address in zip(tensors, self._addresses, strict=True):
            end = begin + tensor.numel()
            cuts = [begin, *range((begin // self._block + 1) * self._block, end, self._block), end]
            rows += [(address + (a - begin) * 4, a, b - a) for a, b in pairwise(cuts)]
            begin = end
        self._starts = [start for _, start, _ in rows]
        self.aligned = all(address % 16 == 0 and (start | count) % 4 == 0 for address, start, count in rows)
        self.table = torch.tensor(rows, dtype=torch.int64).to(tensors[0].device)

    @cached_property
    def firsts(self) -> Tensor:
        """The first entry of every block of all parts, and the number of entries. The last part may go beyond the
        tensors."""
        numel = sum(tensor.numel() for tensor in self._tensors)
        blocks = -(-numel // self._part_elements) * (self._part_elements // self._block)
        begins = torch.arange(blocks + 1) * self._block
        return torch.searchsorted(torch.tensor(self._starts), begins).to(self.table.device)

    @property
    def moved(self) -> bool:
        """Whether a tensor has other memory than when this was built."""
        return any(t.data_ptr() != address for t, address in zip(self._tensors, self._addresses, strict=True))

    def _entries(self, start: int, stop: int) -> tuple[int, int]:
        first = bisect_left(self._starts, start)
        return first, bisect_left(self._starts, stop) - first

    def outer_gradient(self, start: int, anchor: Tensor, out: Tensor) -> None:
        """out ← anchor − θ_i for the fragment's elements from `start` on."""
        first, count = self._entries(start, start + anchor.numel())
        _gradient_kernel[(count,)](
            self.table, first, start, anchor, out, BLOCK=self._block, ALIGNED=self.aligned, enable_fp_fusion=False
        )

    @staticmethod
    def know(outer: OuterOptimizer) -> bool:
        return type(outer) in _KINDS

    def outer_step(
        self,
        start: int,
        outer: OuterOptimizer,
        anchor: Tensor,
        state: Mapping[str, Tensor],
        delta: Tensor | None,
        mixing: float,
    ) -> None:
        """Let the anchor take the outer step along `delta` (None: this worker's own, anchor − θ_i), and θ_i follow
        it."""
        first, count = self._entries(start, start + anchor.numel())
        _step_kernel[(count,)](
            self.table, first, start, anchor, state.get("momentum", anchor), anchor if delta is None else delta,
            *numbers_of(outer), 1.0 - mixing,
            KIND=kind_of(outer), ALONE=delta is None, MIX=mixing > 0,
            BLOCK=self._block, ALIGNED=self.aligned, enable_fp_fusion=False,
        )  # fmt: skip
