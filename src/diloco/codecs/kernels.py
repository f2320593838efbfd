"""fp16, int8, int4 and e3m0 on a GPU (Triton): a part is read once from memory to encode it, written once to decode it.

The bytes are those of the tensor operations in floats.py, integers.py and e3m0.py: divisions are exactly rounded, and
no multiplication is fused with an addition. Imported only where there is a GPU, since Triton may be absent elsewhere.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diloco.codecs.blocks import INT4_BLOCK, INT4_LARGEST_SCALE, INT8_BLOCK, INT8_LARGEST_SCALE, SMALLEST_SCALE

_BLOCK = 4096
_FP16_BLOCK, _FP16_WARPS = 16384, 32
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def round_to_even(x):
    """Round to the nearest whole number, |x| < 2^22: adding 1.5 · 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


# fp16: one scale for a part, so a part is read twice, the second time from the GPU's cache


@triton.jit
def fp16_shift(most):
    """Return the power of two by which a part is scaled; `most` is its largest |value|."""
    exponent = (most.to(tl.int32, bitcast=True) >> 23) - 126  # most < 2^exponent
    exponent = tl.where(most == 0.0, 0, exponent)
    return tl.minimum(tl.maximum(15 - exponent, -126), 126)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp16_code(x, shift, top):
    return tl.minimum(tl.maximum(x * power_of_two(shift), -top), top).to(tl.float16)


@triton.jit
def _encode_fp16(values, out, rows, elements, row_bytes, top, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):  # few rows at a time: they stay in the cache
        row = tl.cast(number, tl.int64)
        source = values + row * elements
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, elements, BLOCK):
            x = tl.load(source + start + at, start + at < elements, 0.0, eviction_policy="evict_last")
            largest = tl.maximum(largest, tl.abs(x))
        shift = fp16_shift(tl.max(largest))
        target = (out + row * row_bytes).to(tl.pointer_type(tl.float16))
        last = (elements - 1) // BLOCK * BLOCK
        for before in range(0, elements, BLOCK):  # backwards: what was read last is in the cache most surely
            start = last - before
            x = tl.load(source + start + at, start + at < elements, 0.0, eviction_policy="evict_first")
            tl.store(target + start + at, fp16_code(x, shift, top), start + at < elements)
        back = (out + row * row_bytes + 2 * elements).to(tl.pointer_type(tl.float32))
        tl.store(back, power_of_two(-shift))


@triton.jit
def _decode_fp16(data, out, elements, row_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = data + row * row_bytes
    scale = tl.load((base + 2 * elements).to(tl.pointer_type(tl.float32)))
    x = tl.load(base.to(tl.pointer_type(tl.float16)) + at, at < elements, 0.0).to(tl.float32)
    tl.store(out + row * elements + at, x * scale, at < elements)


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def encode_scaled_fp16(values: Tensor, out: Tensor, top: float) -> None:
    """Encode values [rows, elements] fp32 into out [rows, 2 · elements + 4] uint8, both contiguous."""
    rows, elements = values.shape
    grid = (min(rows, _processors(values.device.index)),)
    _encode_fp16[grid](
        values, out, rows, elements, out.shape[1], top, BLOCK=_FP16_BLOCK, num_warps=_FP16_WARPS, **EXACT
    )


def decode_scaled_fp16(data: Tensor, out: Tensor) -> None:
    rows, elements = out.shape
    _decode_fp16[(rows, triton.cdiv(elements, _BLOCK))](data, out, elements, data.shape[1], BLOCK=_BLOCK, **EXACT)


# int8: a program has several blocks, each with its own scale


@triton.jit
def int8_code(x, top_scale):
    """Return codes, in fp32, and scales of blocks [blocks, size]."""
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0), top_scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    return round_to_even(tl.minimum(tl.maximum(tl.div_rn(x, divisor[:, None]), -127.0), 127.0)), scale


@triton.jit
def _encode_int8(values, out, elements, row_bytes, top_scale, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < elements
    x = tl.load(values + row * elements + at, inside, 0.0)
    code, scale = int8_code(x, top_scale)
    base = out + row * row_bytes
    tl.store(base.to(tl.pointer_type(tl.int8)) + at, code.to(tl.int8), inside)
    scales = (base + elements).to(tl.pointer_type(tl.float32))
    tl.store(scales + block, scale, block * SIZE < elements)


@triton.jit
def _decode_int8(data, out, elements, row_bytes, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < elements
    base = data + row * row_bytes
    scale = tl.load((base + elements).to(tl.pointer_type(tl.float32)) + block, block * SIZE < elements, 0.0)
    code = tl.load(base.to(tl.pointer_type(tl.int8)) + at, inside, 0)
    tl.store(out + row * elements + at, code.to(tl.float32) * scale[:, None], inside)


def encode_int8(values: Tensor, out: Tensor) -> None:
    rows, elements = values.shape
    _encode_int8[_grid(rows, elements)](
        values, out, elements, out.shape[1], INT8_LARGEST_SCALE, BLOCKS=_BLOCK // INT8_BLOCK, SIZE=INT8_BLOCK, **EXACT
    )


def decode_int8(data: Tensor, out: Tensor) -> None:
    rows, elements = out.shape
    _decode_int8[_grid(rows, elements)](
        data, out, elements, data.shape[1], BLOCKS=_BLOCK // INT8_BLOCK, SIZE=INT8_BLOCK, **EXACT
    )


def _grid(rows: int, elements: int) -> tuple[int, int]:
    return rows, triton.cdiv(elements, _BLOCK)


# int4 and e3m0: a byte has two codes, of elements that are half a part apart


@triton.jit
def int4_code(x, least_scale, top_scale):
    """Return codes and scales of blocks [blocks, size]."""
    scale = tl.minimum(tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=1), 7.0), least_scale), top_scale)
    code = round_to_even(tl.minimum(tl.maximum(tl.div_rn(x, scale[:, None]), -7.0), 7.0))
    return code.to(tl.int32), scale


@triton.jit
def e3m0_code(x, least_scale):
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), least_scale)
    bits = tl.div_rn(x, scale[:, None]).to(tl.int32, bitcast=True)
    rounded = (bits + 4194304) >> 23
    code = tl.maximum((rounded & 255) - 120, 0) | ((rounded >> 8) & 8)
    return code, scale


@triton.jit
def _encode_4_bits(
    values,
    out,
    elements,
    row_bytes,
    least_scale,
    top_scale,
    E3M0: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = elements // 2
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < half
    source = values + row * elements + at
    low = tl.load(source, inside, 0.0)
    high = tl.load(source + half, inside, 0.0)
    if E3M0:
        low_code, low_scale = e3m0_code(low, least_scale)
        high_code, high_scale = e3m0_code(high, least_scale)
    else:
        low_code, low_scale = int4_code(low, least_scale, top_scale)
        high_code, high_scale = int4_code(high, least_scale, top_scale)
        low_code += 8
    base = out + row * row_bytes
    tl.store(base + at, (low_code | (high_code << 4)).to(tl.uint8), inside)
    scales = (base + half).to(tl.pointer_type(tl.float32)) + block
    tl.store(scales, low_scale, block * SIZE < half)
    tl.store(scales + half // SIZE, high_scale, block * SIZE < half)


@triton.jit
def int4_value(code, scale):
    return code.to(tl.float32) * scale[:, None]


@triton.jit
def e3m0_value(code, scale):
    power = (((code & 7) << 23) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return (power * 1329227995784915872903807060280344576.0) * scale[:, None]  # 2^120, as in e3m0.py


@triton.jit
def _decode_4_bits(data, out, elements, row_bytes, E3M0: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    half = elements // 2
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < half
    base = data + row * row_bytes
    packed = tl.load(base + at, inside, 0).to(tl.int32)
    scales = (base + half).to(tl.pointer_type(tl.float32)) + block
    low_scale = tl.load(scales, block * SIZE < half, 0.0)
    high_scale = tl.load(scales + half // SIZE, block * SIZE < half, 0.0)
    target = out + row * elements + at
    if E3M0:
        tl.store(target, e3m0_value(packed & 15, low_scale), inside)
        tl.store(target + half, e3m0_value(packed >> 4, high_scale), inside)
    else:
        tl.store(target, int4_value((packed & 15) - 8, low_scale), inside)
        tl.store(target + half, int4_value((packed << 24) >> 28, high_scale), inside)


def _encode_halves(values: Tensor, out: Tensor, *, e3m0: bool) -> None:
    rows, elements = values.shape
    _encode_4_bits[_grid(rows, elements // 2)](
        values, out, elements, out.shape[1], SMALLEST_SCALE, INT4_LARGEST_SCALE,
        E3M0=e3m0, BLOCKS=_BLOCK // INT4_BLOCK, SIZE=INT4_BLOCK, **EXACT,
    )  # fmt: skip


def _decode_halves(data: Tensor, out: Tensor, *, e3m0: bool) -> None:
    rows, elements = out.shape
    _decode_4_bits[_grid(rows, elements // 2)](
        data, out, elements, data.shape[1], E3M0=e3m0, BLOCKS=_BLOCK // INT4_BLOCK, SIZE=INT4_BLOCK, **EXACT
    )


def encode_int4(values: Tensor, out: Tensor) -> None:
    _encode_halves(values, out, e3m0=False)


def decode_int4(data: Tensor, out: Tensor) -> None:
    _decode_halves(data, out, e3m0=False)


def encode_e3m0(values: Tensor, out: Tensor) -> None:
    _encode_halves(values, out, e3m0=True)


def decode_e3m0(data: Tensor, out: Tensor) -> None:
    _decode_halves(data, out, e3m0=True)
