"""int8 and int4: block-wise linear quantisation, one fp32 scale for every block of values.

    scale = max|block| / top       code = round(x / scale) in −top…top       x ≈ code · scale

Rounds to nearest, ties to even, without randomness: all workers that encode the same values get the same bytes. Each
operation is exactly rounded, so a GPU gets them too.
"""

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.blocks import (
    INT4_BLOCK,
    INT4_LARGEST_SCALE,
    INT8_BLOCK,
    INT8_LARGEST_SCALE,
    SMALLEST_SCALE,
    batches,
    divided,
    largest_of,
    scales_of,
)
from diloco.codecs.encoded import scratch
from diloco.core.gpu import takes_kernels


class Int8(Codec):
    """Codes −127…127, blocks of 256 (1.016 bytes a value); |error| ≤ max|block| / 253.

    Half a step is max|block| / 254; the rest of the bound is room for fp32 rounding. Layout: the codes, the scales.
    """

    name = "int8"

    def part_bytes(self, elements: int) -> int:
        return elements + 4 * (elements // INT8_BLOCK)

    def encode(self, values: Tensor, out: Tensor) -> None:
        if values.is_cuda and takes_kernels(values, out):
            from diloco.codecs.kernels import encode_int8

            encode_int8(values, out)
            return
        elements = values.shape[1]
        for rows in batches(values):
            blocks = values[rows].reshape(-1, INT8_BLOCK)
            buffer = scratch("encode", blocks.shape, blocks.device)
            scales = divided(largest_of(blocks), 127).clamp_(max=INT8_LARGEST_SCALE)
            # A block whose scale is 0 has nothing but zeros, or numbers that 127 times less is 0.
            divisors = torch.where(scales == 0, 1.0, scales)
            codes = torch.div(blocks, divisors, out=buffer).round_()
            least, most = torch.aminmax(divisors)
            if not (float(least) >= SMALLEST_SCALE and float(most) < INT8_LARGEST_SCALE):
                codes.clamp_(-127, 127)  # a scale was rounded much, or is not as large as the block needs
            out[rows, :elements].view(torch.int8).copy_(codes.view(-1, elements))
            scales_of(out[rows], elements).copy_(scales.view(codes.shape[0] * INT8_BLOCK // elements, -1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        if data.is_cuda and takes_kernels(data, out):
            from diloco.codecs.kernels import decode_int8

            decode_int8(data, out)
            return
        elements = out.shape[1]
        for rows in batches(out):
            into = out[rows].copy_(data[rows, :elements].view(torch.int8))
            into.view(len(into), -1, INT8_BLOCK).mul_(scales_of(data[rows], elements).unsqueeze(2))

    def error_bound(self, values: Tensor) -> Tensor:
        return self._block_bounds(values).expand(-1, -1, INT8_BLOCK).reshape(values.shape)

    def error_norm(self, values: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self._block_bounds(values), dim=(1, 2)) * INT8_BLOCK**0.5
        return norms

    def _block_bounds(self, values: Tensor) -> Tensor:
        """Bound the error of each block: [rows, blocks, 1]."""
        return largest_of(values.reshape(len(values), -1, INT8_BLOCK)) / 253 + 2.0**-141


class Int4(Codec):
    """Codes −7…7, blocks of 128 (0.531 bytes a value); |error| ≤ max|block| / 13.99.

    Layout: byte j has the code of element j, plus 8, in its low half, and that of element j + n/2, as a signed number,
    in its high half; then the scales. At worst all values but one are half a step and become a whole one: the norm
    grows by 1.48.
    """

    name = "int4"
    norm_slack = 1.5

    def part_bytes(self, elements: int) -> int:
        return elements // 2 + 4 * (elements // INT4_BLOCK)

    def encode(self, values: Tensor, out: Tensor) -> None:
        if values.is_cuda and takes_kernels(values, out):
            from diloco.codecs.kernels import encode_int4

            encode_int4(values, out)
            return
        elements = values.shape[1]
        half = elements // 2
        for rows in batches(values):
            blocks = values[rows].reshape(-1, INT4_BLOCK)
            buffer = scratch("encode", blocks.shape, blocks.device)
            scales = divided(largest_of(blocks), 7).clamp_(SMALLEST_SCALE, INT4_LARGEST_SCALE)
            codes = torch.div(blocks, scales, out=buffer).round_().view(-1, elements)
            packed = codes[:, :half].add_(codes[:, half:], alpha=16).add_(8)  # whole numbers from -111 to 127
            out[rows, :half].view(torch.int8).copy_(packed)
            scales_of(out[rows], half).copy_(scales.view(len(codes), -1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        if data.is_cuda and takes_kernels(data, out):
            from diloco.codecs.kernels import decode_int4

            decode_int4(data, out)
            return
        half = out.shape[1] // 2
        for rows in batches(out):
            into = out[rows]
            packed = data[rows, :half].view(torch.int8)
            into[:, :half].copy_((packed & 15).sub_(8))
            into[:, half:].copy_(packed >> 4)
            into.view(len(into), -1, INT4_BLOCK).mul_(scales_of(data[rows], half).unsqueeze(2))

    def error_bound(self, values: Tensor) -> Tensor:
        return self._block_bounds(values).expand(-1, -1, INT4_BLOCK).reshape(values.shape)

    def error_norm(self, values: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self._block_bounds(values), dim=(1, 2)) * INT4_BLOCK**0.5
        return norms

    def _block_bounds(self, values: Tensor) -> Tensor:
        """Bound the error of each block: [rows, blocks, 1]."""
        return largest_of(values.reshape(len(values), -1, INT4_BLOCK)) / 13.99 + SMALLEST_SCALE
