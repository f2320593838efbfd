"""The fp16 codec on a GPU (Triton): a part is read once from memory to encode it, written once to decode it.

The bytes are those of floats.Float16's tensor operations. Imported only where there is a GPU, since Triton may be
absent elsewhere.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _encode_kernel(values, out, elements, row_bytes, top, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = values + row * elements
    at = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, elements, BLOCK):
        largest = tl.maximum(largest, tl.abs(tl.load(source + start + at, start + at < elements, 0.0)))
    most = tl.max(largest)
    exponent = (most.to(tl.int32, bitcast=True) >> 23) - 126  # most < 2^exponent
    exponent = tl.where(most == 0.0, 0, exponent)
    shift = tl.minimum(tl.maximum(15 - exponent, -126), 126)
    scale = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    target = (out + row * row_bytes).to(tl.pointer_type(tl.float16))
    for start in range(0, elements, BLOCK):  # from the cache, mostly
        scaled = tl.load(source + start + at, start + at < elements, 0.0) * scale
        limited = tl.minimum(tl.maximum(scaled, -top), top)
        tl.store(target + start + at, limited.to(tl.float16), start + at < elements)
    back = (out + row * row_bytes + 2 * elements).to(tl.pointer_type(tl.float32))
    tl.store(back, ((127 - shift) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _decode_kernel(data, out, elements, row_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = data + row * row_bytes
    scale = tl.load((base + 2 * elements).to(tl.pointer_type(tl.float32)))
    x = tl.load(base.to(tl.pointer_type(tl.float16)) + at, at < elements, 0.0).to(tl.float32)
    tl.store(out + row * elements + at, x * scale, at < elements)


def encode_scaled_fp16(values: Tensor, out: Tensor, top: float) -> None:
    """values [rows, elements] fp32 to out [rows, 2 · elements + 4] uint8, both contiguous."""
    rows, elements = values.shape
    _encode_kernel[(rows,)](values, out, elements, out.shape[1], top, BLOCK=_BLOCK, num_warps=8)


def decode_scaled_fp16(data: Tensor, out: Tensor) -> None:
    rows, elements = out.shape
    _decode_kernel[(rows, triton.cdiv(elements, _BLOCK))](data, out, elements, data.shape[1], BLOCK=_BLOCK)
