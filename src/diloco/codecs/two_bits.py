"""2 bits a value: a sign and one of two sizes, for outer gradients with error feedback.

    a = mean|block|      x ≈ ± 9/16 a  if |x| < 39/32 a,  else ± 15/8 a

These are about the best two sizes for normally distributed values (Lloyd-Max: 0.57, 1.23, 1.89). What a round leaves
out, far values above all, error feedback sends later. The mean of such contributions has more than four values and
travels as int4.
"""

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.blocks import batches, scales_of, whole_numbers
from diloco.codecs.encoded import scratch
from diloco.codecs.integers import Int4
from diloco.core.fragments import PART_QUANTUM

_BLOCK = 256
_SMALL, _BETWEEN, _LARGE = 9 / 16, 39 / 32, 15 / 8  # few bits each: products and sums of them are exact in fp32
_LARGEST_SCALE = (1 - 2.0**-23) * torch.finfo(torch.float32).max / _LARGE  # _LARGE times it is still finite
assert PART_QUANTUM % (4 * _BLOCK) == 0


class TwoBits(Codec):
    """0.266 bytes a value, blocks of 256; |error| ≤ max(0.66 a, |x| − 1.87 a) with a = mean|block|.

    Layout: byte j has the codes of elements j, j + n/4, j + n/2 and j + 3n/4, from its low bits on; bit 0 of a code is
    the size, bit 1 the sign; then each block's a. The norm grows most (by 1.55) if all values are 0 or just 39/32 a.
    """

    name = "2bit"
    norm_slack = 1.75

    def __init__(self) -> None:
        super().__init__(for_means=Int4())

    def part_bytes(self, elements: int) -> int:
        return elements // 4 + 4 * (elements // _BLOCK)

    def encode(self, values: Tensor, out: Tensor) -> None:
        elements = values.shape[1]
        quarter = elements // 4
        for rows in batches(values):
            blocks = values[rows].reshape(-1, _BLOCK)
            sizes = torch.abs(blocks, out=scratch("encode", blocks.shape, blocks.device))
            scales = mean_of(sizes).clamp_(max=_LARGEST_SCALE)
            small = sizes.sub_(scales * _BETWEEN).view(torch.int32).bitwise_right_shift_(31)  # -1 if so, else 0
            codes = whole_numbers("codes", blocks, torch.int8).copy_(small).add_(1)
            codes.sub_(torch.bitwise_right_shift(blocks.view(torch.int32), 31, out=small).to(torch.int8), alpha=2)
            pieces = codes.view(-1, elements).chunk(4, dim=1)
            for number, piece in enumerate(pieces[1:], 1):
                pieces[0].bitwise_or_(piece.bitwise_left_shift_(2 * number))
            out[rows, :quarter].view(torch.int8).copy_(pieces[0])
            scales_of(out[rows], quarter).copy_(scales.view(len(pieces[0]), -1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        quarter = out.shape[1] // 4
        for rows in batches(out):
            into = out[rows]
            packed = data[rows, :quarter]
            for number, factors in enumerate(into.chunk(4, dim=1)):
                codes = (packed >> (2 * number)).view(torch.int8)
                factors.copy_(codes & 1).mul_(_LARGE - _SMALL).add_(_SMALL)
                factors.mul_(torch.empty_like(factors).copy_(codes & 2).neg_().add_(1))
            into.view(len(into), -1, _BLOCK).mul_(scales_of(data[rows], quarter).unsqueeze(2))

    def error_bound(self, values: Tensor) -> Tensor:
        rows, elements = values.shape
        blocks = values.reshape(rows, elements // _BLOCK, _BLOCK).double().abs()
        mean = blocks.mean(dim=2, keepdim=True)
        bound = torch.maximum(0.6563 * mean, blocks - 1.8749 * mean)
        return (bound * (1 + 2.0**-20) + 2.0**-140).view(rows, elements)


def mean_of(values: Tensor) -> Tensor:
    """Return the mean of each row [rows, a power of two] as [rows, 1], summed in a fixed order: the same bits
    everywhere.

    The sum of two halves, of their halves, and so on. Divided first, so that the largest numbers do not overflow.
    """
    sums = values * (1.0 / values.shape[1])
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums
