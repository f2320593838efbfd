"""A 64-bit digest of a flat fp32 tensor: equal bits give equal digests, on any device.

Each round the workers compare the digests of their anchors, so it must cost little more than reading the memory once:
a multilinear hash over the bits, not a cryptographic one. It finds accidents (a lost update, a flipped bit, a worker
that stepped alone), it does not stand against a forger.
"""

from functools import lru_cache

import torch
from torch import Tensor

_ROW = 4096  # elements a row: each column has a multiplier, and each row has one
_ROWS_AT_ONCE = {"cpu": 32}  # 512 KiB: stays in cache
_ROWS_AT_ONCE_ELSEWHERE = 8192
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


@lru_cache(maxsize=8)
def _multipliers(count: int, salt: int, device: torch.device) -> Tensor:
    """Odd 64-bit pseudo-random numbers (splitmix64): odd, so that any single changed bit changes the sum."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * _GOLDEN + salt
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x ^ ((x >> 31) & ((1 << 33) - 1))) | 1).to(device)


@torch.no_grad()
def digest(flat: Tensor) -> str:
    """Sixteen hexadecimal digits for the bits and the length of `flat` (fp32, one dimension, contiguous)."""
    assert flat.dtype == torch.float32 and flat.dim() == 1 and flat.is_contiguous()
    columns = _multipliers(_ROW // 2, 1, flat.device)
    step = _ROW * _ROWS_AT_ONCE.get(flat.device.type, _ROWS_AT_ONCE_ELSEWHERE)
    product = torch.empty(min(step, flat.numel() + _ROW) // _ROW, _ROW // 2, dtype=torch.int64, device=flat.device)
    row_sums = []
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        if chunk.numel() % _ROW or chunk.storage_offset() % 2:  # int64 needs whole rows at an even offset
            padded = chunk.new_zeros(-(-chunk.numel() // _ROW) * _ROW)
            padded[: chunk.numel()] = chunk
            chunk = padded
        rows = chunk.view(torch.int64).view(-1, _ROW // 2)
        row_sums.append(torch.mul(rows, columns, out=product[: len(rows)]).sum(1))
    sums = torch.cat(row_sums) if row_sums else torch.zeros(0, dtype=torch.int64, device=flat.device)
    total = int((sums * _multipliers(sums.numel(), 2, flat.device)).sum())
    return f"{(total ^ (flat.numel() * _GOLDEN)) & 0xFFFF_FFFF_FFFF_FFFF:016x}"
