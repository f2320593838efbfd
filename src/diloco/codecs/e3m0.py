"""E3M0: 4-bit floating point, a sign and a power of two (Streaming DiLoCo, arXiv 2501.18512, §3.3: as good as fp32).

    x ≈ ± 2^(code − 7) · max|block|      code 1…7, and 0 for zero

Seven powers of two cover a factor of 64 within a block: small values beside a large one keep their size, where int4
keeps at most seven steps.
"""

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.blocks import SMALLEST_SCALE, batches, scales_of, whole_numbers
from diloco.codecs.encoded import scratch
from diloco.core.fragments import PART_QUANTUM
from diloco.core.gpu import takes_kernels

BLOCK = 128
_ROUNDS_UP = 1 << 22  # half of fp32's mantissa: from 1.5 · 2^e on it carries into the exponent
_LEAST = 120  # fp32's exponent field of the largest power of two that becomes zero: 2^(120 − 127)
_FP16_BITS = (7 << 10) - (1 << 15)  # the sign, and the lowest three bits of the exponent
_LARGE = 2.0**119
assert PART_QUANTUM % (2 * BLOCK) == 0


class E3M0(Codec):
    """Rounded to a power of two of max|block|, 0.531 bytes a value; |error| ≤ |x| / 3, or |x| if |x| is small.

    Small: below 1.5 · 2^−7 max|block|, which becomes zero. The midpoint of two powers is rounded away from zero. The
    scale is max|block|. Layout as int4's: a byte has the codes of elements j and j + elements / 2, the sign above the
    three bits of the exponent; then the scales.
    """

    name = "e3m0"
    norm_slack = 1.35  # a value grows by a third at most

    def part_bytes(self, elements: int) -> int:
        return elements // 2 + 4 * (elements // BLOCK)

    def encode(self, values: Tensor, out: Tensor) -> None:
        if values.is_cuda and takes_kernels(values, out):
            from diloco.codecs.kernels import encode_e3m0

            encode_e3m0(values, out)
            return
        elements = values.shape[1]
        half = elements // 2
        for rows in batches(values):
            blocks = values[rows].reshape(-1, BLOCK)
            buffer = scratch("encode", blocks.shape, blocks.device)
            scales = torch.abs(blocks, out=buffer).amax(dim=1, keepdim=True).clamp_(min=SMALLEST_SCALE)
            codes = torch.div(buffer, scales, out=buffer).view(torch.int32)  # as bits: the exponent is on top
            codes.add_(_ROUNDS_UP - (_LEAST << 23)).bitwise_right_shift_(23).clamp_(min=0)
            signs = scratch("signs", blocks.shape, blocks.device).view(torch.int32)
            codes.sub_(torch.bitwise_right_shift(blocks.view(torch.int32), 31, out=signs), alpha=8)  # a sign is 0 or -1
            codes = codes.view(-1, elements)
            out[rows, :half].copy_(codes[:, :half].add_(codes[:, half:], alpha=16))
            scales_of(out[rows], half).copy_(scales.view(len(codes), -1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        if data.is_cuda and takes_kernels(data, out):
            from diloco.codecs.kernels import decode_e3m0

            decode_e3m0(data, out)
            return
        half = out.shape[1] // 2
        for rows in batches(out):
            into = out[rows]
            packed = data[rows, :half]
            codes = whole_numbers("codes", packed, torch.int16)
            bits = whole_numbers("bits", into, torch.int16)
            codes.copy_(packed)
            # The code becomes fp16's sign and exponent field: ± 2^(code − 15), and 0 for 0.
            for half_bits, left in ((bits[:, :half], 12), (bits[:, half:], 8)):
                torch.bitwise_left_shift(codes, left, out=half_bits).bitwise_right_shift_(2).bitwise_and_(_FP16_BITS)
            scales = scales_of(data[rows], half)
            into.copy_(bits.view(torch.float16))
            if scales.amax() < _LARGE and scales.amin() >= 0:  # 2^8 times such a scale is exact
                scales = scales * 2.0**8
            else:
                into.mul_(2.0**8)
            into.view(len(into), -1, BLOCK).mul_(scales.unsqueeze(2))

    def error_bound(self, values: Tensor) -> Tensor:
        rows, elements = values.shape
        blocks = values.reshape(rows, elements // BLOCK, BLOCK).abs()
        largest = blocks.amax(dim=2, keepdim=True)
        bound = torch.where(blocks < 0.01172 * largest, blocks, blocks / 2.9999)  # 0.01172 is just above 1.5 / 128
        return (bound + SMALLEST_SCALE).view(rows, elements)
