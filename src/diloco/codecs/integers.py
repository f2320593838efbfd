"""int8: block-wise linear quantisation, one fp32 scale for every 256 values (1.016 bytes a value)."""

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import scratch
from diloco.core.fragments import PART_QUANTUM

_BLOCK = 256
_LARGEST_SCALE = (1 - 2.0**-23) * torch.finfo(torch.float32).max / 127  # 127 times it is still finite in fp32
assert PART_QUANTUM % _BLOCK == 0


class Int8(Codec):
    """x ≈ code · scale with code in −127…127 and scale = max|block| / 127; |error| ≤ max|block| / 253.

    Half a step is max|block| / 254; the rest of the bound is room for fp32 rounding. Rounds to nearest, ties to even,
    without randomness: all workers that encode the same values get the same bytes.
    Layout of a part: the codes, then the scales of its blocks in fp32.
    """

    name = "int8"

    def part_bytes(self, elements: int) -> int:
        return elements + 4 * (elements // _BLOCK)

    def encode(self, values: Tensor, out: Tensor) -> None:
        rows, elements = values.shape
        blocks = values.view(rows, elements // _BLOCK, _BLOCK)
        buffer = scratch("encode", blocks.shape, blocks.device)
        largest = torch.abs(blocks, out=buffer).amax(dim=2, keepdim=True)
        scales = (largest / 127).clamp_(max=_LARGEST_SCALE)
        codes = torch.div(blocks, scales, out=buffer).nan_to_num_(nan=0.0).round_().clamp_(-127, 127)
        out[:, :elements].view(torch.int8).copy_(codes.view(rows, elements))
        out[:, elements:].view(torch.float32).copy_(scales.view(rows, -1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        rows, elements = out.shape
        out.copy_(data[:, :elements].view(torch.int8))
        scales = data[:, elements:].view(torch.float32)
        out.view(rows, elements // _BLOCK, _BLOCK).mul_(scales.unsqueeze(2))

    def error_bound(self, values: Tensor) -> Tensor:
        rows, elements = values.shape
        largest = values.view(rows, elements // _BLOCK, _BLOCK).abs().amax(dim=2, keepdim=True)
        return (largest / 253 + 2.0**-141).expand(-1, -1, _BLOCK).reshape(rows, elements)
