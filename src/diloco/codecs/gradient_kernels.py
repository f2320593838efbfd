"""Encoding an outer gradient, and the outer step with an encoded mean, each in one launch for a whole fragment.

With core/kernels.py and codecs/kernels.py after one another, the outer gradient in fp32 is written to memory and read
again by each, span by span. Here it is never in memory: encoding reads anchor and θ_i and writes bytes (with fp16 it
reads them twice, first for the largest value of a part), and the step reads the bytes of the mean, and reads and
writes the rest as core/kernels.py does. Norms and digests are sums that the same launches leave behind.

The bits are those of the two. Imported only where there is a GPU, since Triton may be absent elsewhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diloco.codecs.blocks import INT4_BLOCK, INT4_LARGEST_SCALE, INT8_BLOCK, INT8_LARGEST_SCALE, SMALLEST_SCALE
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.floats import FP16_TOP
from diloco.codecs.kernels import (
    EXACT,
    e3m0_code,
    e3m0_value,
    fp16_code,
    fp16_shift,
    int4_code,
    int4_value,
    int8_code,
    power_of_two,
)
from diloco.core.digest import ROW, Digest, factors
from diloco.core.fragments import Fragment
from diloco.core.kernels import Kernels, anchor_after, entry, kind_of, numbers_of, theta_after
from diloco.core.outer_optimizers import OuterOptimizer

_BLOCK = 4096
_CODES = {"fp16": 0, "int8": 1, "int4": 2, "e3m0": 3}
_SIZES = {"fp16": 1024, "int8": INT8_BLOCK, "int4": INT4_BLOCK, "e3m0": INT4_BLOCK}


def kernels_for(fragment: Fragment, vector: EncodedVector) -> Kernels | None:
    """Return the fragment's kernels if its rounds can be taken in one pass with this vector: all of it is on one
    GPU."""
    if fragment.offload or vector.codec.name not in _CODES or vector.data.device != fragment.device:
        return None
    return None if fragment.layout.part_elements % (2 * _BLOCK) else fragment.kernels


@triton.jit
def _delta(table, firsts, block, at, anchor, numel, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Compute anchor − θ_i of a block of the fragment, zero past its end; θ_i of a block may be of several tensors."""
    theta_i = tl.zeros(at.shape, tl.float32)
    for number in range(tl.load(firsts + block), tl.load(firsts + block + 1)):
        theta, start, count = entry(table, number, ALIGNED)
        in_tensor = at - (start - block * BLOCK)
        mask = (in_tensor >= 0) & (in_tensor < count)
        theta_i = tl.where(mask, tl.load(theta + in_tensor, mask, 0.0), theta_i)
    place = block * BLOCK + at
    return tl.load(anchor + place, place < numel, 0.0) - theta_i


@triton.jit
def _largest_kernel(table, firsts, anchor, numel, largest, BLOCKS, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """largest ← max|part| of every part, as the bits of it, which for positive numbers have the same order."""
    block = tl.program_id(0).to(tl.int64)
    x = _delta(table, firsts, block, tl.arange(0, BLOCK), anchor, numel, BLOCK, ALIGNED)
    tl.atomic_max(largest + block // BLOCKS, tl.max(tl.abs(x)).to(tl.int32, bitcast=True))


@triton.jit
def _squares(x, value):
    error = value - x
    return tl.sum(error * error), tl.sum(x * x)


@triton.jit
def _encode_kernel(
    table, firsts, anchor, numel, largest, out, sums, elements, row_bytes, top, least_scale, top_scale,
    CODE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Encode anchor − θ_i. A program has a block of a part; with 4 bits also the one that is half a part further."""
    part = tl.program_id(0).to(tl.int64)
    own_block = tl.program_id(1)
    block = part * (elements // BLOCK) + own_block
    scale_at = tl.arange(0, BLOCK // SIZE)
    at = scale_at[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    base = tl.multiple_of(out + part * row_bytes, 4)
    x = _delta(table, firsts, block, at, anchor, numel, BLOCK, ALIGNED)
    if CODE == 0:
        shift = fp16_shift(tl.load(largest + part).to(tl.float32, bitcast=True))
        code = fp16_code(x, shift, top)
        back = power_of_two(-shift)
        tl.store(base.to(tl.pointer_type(tl.float16)) + own_block * BLOCK + at, code)
        tl.store((base + 2 * elements).to(tl.pointer_type(tl.float32)), back, own_block == 0)
        error, square = _squares(x, code.to(tl.float32) * back)
    elif CODE == 1:
        code, scale = int8_code(x, top_scale)
        tl.store(base.to(tl.pointer_type(tl.int8)) + own_block * BLOCK + at, code.to(tl.int8))
        tl.store((base + elements).to(tl.pointer_type(tl.float32)) + own_block * (BLOCK // SIZE) + scale_at, scale)
        error, square = _squares(x, code * scale[:, None])
    else:
        half = elements // 2
        y = _delta(table, firsts, block + half // BLOCK, at, anchor, numel, BLOCK, ALIGNED)
        if CODE == 2:
            low, low_scale = int4_code(x, least_scale, top_scale)
            high, high_scale = int4_code(y, least_scale, top_scale)
            error, square = _squares(x, int4_value(low, low_scale))
            more_error, more_square = _squares(y, int4_value(high, high_scale))
            low += 8
        else:
            low, low_scale = e3m0_code(x, least_scale)
            high, high_scale = e3m0_code(y, least_scale)
            error, square = _squares(x, e3m0_value(low, low_scale))
            more_error, more_square = _squares(y, e3m0_value(high, high_scale))
        error, square = error + more_error, square + more_square
        tl.store(base + own_block * BLOCK + at, (low | (high << 4)).to(tl.uint8))
        scales = (base + half).to(tl.pointer_type(tl.float32)) + own_block * (BLOCK // SIZE) + scale_at
        tl.store(scales, low_scale)
        tl.store(scales + half // SIZE, high_scale)
    mine = sums + 2 * (part * tl.num_programs(1) + own_block)
    tl.store(mine, error)
    tl.store(mine + 1, square)


def encode_gradient(kernels: Kernels, fragment: Fragment, vector: EncodedVector) -> Tensor:
    """Encode anchor − θ_i into `vector`; returns the squared error of that and the squared norm of the outer
    gradient."""
    part = fragment.layout.part_elements
    out = vector.data
    name = vector.codec.name
    largest = torch.zeros(len(out), dtype=torch.int32, device=out.device)
    gradient = (kernels.table, kernels.firsts, fragment.anchor, fragment.numel, largest)
    if name == "fp16":
        _largest_kernel[(len(out) * (part // _BLOCK),)](
            *gradient, part // _BLOCK, BLOCK=_BLOCK, ALIGNED=kernels.aligned, **EXACT
        )
    grid = _grid(fragment, name)
    sums = torch.empty((grid[0] * grid[1], 2), device=out.device)
    top_scale = INT8_LARGEST_SCALE if name == "int8" else INT4_LARGEST_SCALE
    _encode_kernel[grid](
        *gradient, out, sums, part, out.shape[1], FP16_TOP, SMALLEST_SCALE, top_scale,
        CODE=_CODES[name], BLOCK=_BLOCK, SIZE=_SIZES[name], ALIGNED=kernels.aligned, **EXACT,
    )  # fmt: skip
    return sums.sum(0, dtype=torch.float64)


def _grid(fragment: Fragment, codec: str) -> tuple[int, int]:
    blocks = fragment.layout.part_elements // _BLOCK
    return fragment.layout.num_parts, blocks if codec in ("fp16", "int8") else blocks // 2


@triton.jit
def _take_step(
    table, firsts, block, at, anchor, momentum, numel, columns, rows, d, lr, mu, weight,
    KIND: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take the outer step of a block along `d`; returns what it adds to the mean's squared norm and to the anchor's
    digest."""
    place = block * BLOCK + at
    inside = place < numel
    a = anchor_after(anchor + place, momentum + place, d, inside, lr, mu, KIND)
    tl.store(anchor + place, a, inside)
    for number in range(tl.load(firsts + block), tl.load(firsts + block + 1)):
        theta, start, count = entry(table, number, ALIGNED)
        in_tensor = at - (start - block * BLOCK)
        mask = (in_tensor >= 0) & (in_tensor < count)
        tl.store(theta + in_tensor, theta_after(theta + in_tensor, a, mask, weight, MIX), mask)
    bits = tl.where(inside, a.to(tl.uint32, bitcast=True), 0).to(tl.int64)
    sums = tl.sum(bits * tl.load(columns + at % ROW), axis=1)
    first = block * BLOCK + tl.arange(0, BLOCK // SIZE) * SIZE
    return tl.sum(d * d), tl.sum(sums * tl.load(rows + first // ROW, first < numel, 0))


@triton.jit
def _step_kernel(
    table, firsts, anchor, momentum, numel, data, columns, rows, norms, digests, elements, row_bytes, lr, mu, weight,
    CODE: tl.constexpr, KIND: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    ROW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take the outer step with an encoded mean. Grid and blocks as in _encode_kernel; `columns` and `rows` as in
    core/digest.py."""
    part = tl.program_id(0).to(tl.int64)
    own_block = tl.program_id(1)
    block = part * (elements // BLOCK) + own_block
    scale_at = tl.arange(0, BLOCK // SIZE)
    at = scale_at[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    base = tl.multiple_of(data + part * row_bytes, 4)
    if CODE == 0:
        scale = tl.load((base + 2 * elements).to(tl.pointer_type(tl.float32)))
        d = tl.load(base.to(tl.pointer_type(tl.float16)) + own_block * BLOCK + at).to(tl.float32) * scale
    elif CODE == 1:
        scales = tl.load((base + elements).to(tl.pointer_type(tl.float32)) + own_block * (BLOCK // SIZE) + scale_at)
        d = tl.load(base.to(tl.pointer_type(tl.int8)) + own_block * BLOCK + at).to(tl.float32) * scales[:, None]
    else:
        half = elements // 2
        packed = tl.load(base + own_block * BLOCK + at).to(tl.int32)
        scales = (base + half).to(tl.pointer_type(tl.float32)) + own_block * (BLOCK // SIZE) + scale_at
        low_scale = tl.load(scales)
        high_scale = tl.load(scales + half // SIZE)
        if CODE == 2:
            d = int4_value((packed & 15) - 8, low_scale)
            high = int4_value((packed << 24) >> 28, high_scale)
        else:
            d = e3m0_value(packed & 15, low_scale)
            high = e3m0_value(packed >> 4, high_scale)
    square, digest = _take_step(
        table, firsts, block, at, anchor, momentum, numel, columns, rows, d, lr, mu, weight,
        KIND, MIX, BLOCK, SIZE, ROW, ALIGNED,
    )  # fmt: skip
    if CODE >= 2:
        more, more_digest = _take_step(
            table, firsts, block + elements // 2 // BLOCK, at, anchor, momentum, numel, columns, rows, high,
            lr, mu, weight, KIND, MIX, BLOCK, SIZE, ROW, ALIGNED,
        )  # fmt: skip
        square, digest = square + more, digest + more_digest
    mine = part * tl.num_programs(1) + own_block
    tl.store(norms + mine, square)
    tl.store(digests + mine, digest)


def step_with_mean(
    kernels: Kernels, fragment: Fragment, encoded: EncodedVector, outer: OuterOptimizer, mixing: float, digest: Digest
) -> Tensor:
    """Take the outer step along an encoded mean, which θ_i follows; returns the squared norm of the mean. `digest`: a
    new one."""
    name = encoded.codec.name
    anchor = fragment.anchor
    data = encoded.data
    grid = _grid(fragment, name)
    norms = torch.empty(grid[0] * grid[1], device=anchor.device)
    digests = torch.empty(grid[0] * grid[1], dtype=torch.int64, device=anchor.device)
    columns, rows = factors(fragment.numel, anchor.device)
    _step_kernel[grid](
        kernels.table, kernels.firsts, anchor, fragment.state.get("momentum", anchor), fragment.numel, data,
        columns, rows, norms, digests, fragment.layout.part_elements, data.shape[1], *numbers_of(outer), 1.0 - mixing,
        CODE=_CODES[name], KIND=kind_of(outer), MIX=mixing > 0, BLOCK=_BLOCK, SIZE=_SIZES[name], ROW=ROW,
        ALIGNED=kernels.aligned, **EXACT,
    )  # fmt: skip
    digest.add_total(digests.sum(), fragment.numel)
    return norms.sum(dtype=torch.float64)
