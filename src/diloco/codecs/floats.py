"""fp32, fp16 and bf16: an outer gradient as floating-point numbers of 4 or 2 bytes.

OpenDiLoCo (arXiv 2407.07852, §3.4) found fp16 as good as fp32 at half the bytes. Outer gradients are small, often below
fp16's normal range, so our fp16 scales each part up to the top of that range by a power of two, which is exact: it
never overflows, and the error of small values beside large ones stays within the stated bound.
"""

import math

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import scratch
from diloco.core.gpu import takes_kernels

_FP32_TINY = 2.0**-149  # the smallest step between two fp32 numbers
FP16_TOP = 2.0**15 - 2.0**4  # fp16's last number before 2^15: rounded up to 2^15, fp32's largest would decode as inf


class Float32(Codec):
    """The fp32 bits unchanged."""

    name = "fp32"
    lossless = stable = True

    def part_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(torch.float32).copy_(values)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.float32))

    def error_bound(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values)


class BFloat16(Codec):
    """Rounded to 8 significant bits; |error| ≤ 2^-8 |x|. Values beyond bf16's largest number become that number."""

    name = "bf16"
    stable = True

    def part_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        largest = torch.finfo(torch.bfloat16).max
        limited = torch.clamp(values, -largest, largest, out=scratch("encode", values.shape, values.device))
        out.view(torch.bfloat16).copy_(limited)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.bfloat16))

    def error_bound(self, values: Tensor) -> Tensor:
        return values.abs() * 2.0**-8 + 2.0**-133


class Float16(Codec):
    """Scaled by a power of two per part, then 11 significant bits; |error| ≤ 2^-11 |x| + 2^-39 max|part|.

    Layout of a part: the fp16 values, then the scale as one fp32.
    """

    name = "fp16"
    stable = True  # the largest value of a part keeps its exponent, so the scale is the same

    def part_bytes(self, elements: int) -> int:
        return 2 * elements + 4

    def encode(self, values: Tensor, out: Tensor) -> None:
        if values.is_cuda and takes_kernels(values, out):
            from diloco.codecs.kernels import encode_scaled_fp16

            encode_scaled_fp16(values, out, FP16_TOP)
            return
        # Not aminmax and not an infinity norm: along a dimension both are ten times slower on the CPU.
        most = values.amax(dim=1).tolist()
        least = values.amin(dim=1).tolist()
        largest = [max(high, -low) for high, low in zip(most, least, strict=True)]
        # |x| < 2^frexp(x)[1]; 2^15 is within fp16's range, and 2^±126 within fp32's
        shifts = [min(max(15 - math.frexp(size)[1], -126), 126) for size in largest]
        scales = torch.tensor([[2.0**shift for shift in shifts], [2.0**-shift for shift in shifts]])
        scales = scales.to(values.device).unsqueeze(2)  # [there and back, rows, 1]
        within = all(size * 2.0**shift <= FP16_TOP for size, shift in zip(largest, shifts, strict=True))
        scaled = torch.mul(values, scales[0], out=scratch("encode", values.shape, values.device))
        if not within:
            scaled.clamp_(-FP16_TOP, FP16_TOP)
        out[:, :-4].view(torch.float16).copy_(scaled)
        out[:, -4:].view(torch.float32).copy_(scales[1])

    def decode(self, data: Tensor, out: Tensor) -> None:
        if data.is_cuda and takes_kernels(data, out):
            from diloco.codecs.kernels import decode_scaled_fp16

            decode_scaled_fp16(data, out)
            return
        out.copy_(data[:, :-4].view(torch.float16)).mul_(data[:, -4:].view(torch.float32))

    def error_bound(self, values: Tensor) -> Tensor:
        return values.abs() * 2.0**-11 + values.abs().amax(dim=1, keepdim=True) * 2.0**-39 + 4 * _FP32_TINY

    def error_norm(self, values: Tensor) -> Tensor:
        """Return a bound that needs no maximum: each value of a row is at most as large as its norm."""
        norms = torch.linalg.vector_norm(values, dim=1)
        root = values.shape[1] ** 0.5
        bound: Tensor = norms * (2.0**-11 + root * 2.0**-39) + root * 4 * _FP32_TINY
        return bound
