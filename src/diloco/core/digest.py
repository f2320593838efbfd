"""A 64-bit digest of a flat fp32 tensor: equal bits give equal digests, on any device.

The workers compare the digests of their anchors in each round, so a digest must cost little more than reading the
memory once: a multilinear hash over the bits. It detects accidents (a lost update, a flipped bit, a worker that stepped
alone); it is not cryptographic and does not detect forgery. It is computed span by span, during the outer step.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from diloco.core.gpu import has_triton

ROW = 1024  # elements a row: each column has a multiplier, and each row has one
_ROWS_AT_ONCE = {"cpu": 512}  # 2 MiB, as spans have
_ROWS_AT_ONCE_ELSEWHERE = 32768
_ROW_BLOCK = 65536  # rows whose multipliers are computed together, and kept
_FEW_THREADS = 2  # so many sum faster by column: a product of matrix and vector, which has one thread, but one pass
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


def _multipliers(first: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Make odd 64-bit pseudo-random numbers (splitmix64): odd, so that any single changed bit changes the sum."""
    x = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device) * _GOLDEN + salt
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


@lru_cache(maxsize=8)
def _column_multipliers(device: torch.device) -> Tensor:
    return _multipliers(0, ROW // 2, 1, device)


@lru_cache(maxsize=256)
def _row_block(block: int, device: torch.device) -> Tensor:
    return _multipliers(block * _ROW_BLOCK, _ROW_BLOCK, 2, device)


def _row_multipliers(first: int, count: int, device: torch.device) -> Tensor:
    block, place = divmod(first, _ROW_BLOCK)
    if place + count <= _ROW_BLOCK:
        return _row_block(block, device)[place : place + count]
    return _multipliers(first, count, 2, device)


@lru_cache(maxsize=8)
def factors(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factor of each element of a row, and of each row: a digest is the sum of the elements' bits times
    both."""
    both = torch.stack([_column_multipliers(device), _column_multipliers(device) << 32], dim=1)
    return both.view(ROW), _row_multipliers(0, -(-numel // ROW), device)


class Digest:
    """The digest of a tensor that is added piece by piece, in order; every piece but the last is a multiple of ROW."""

    def __init__(self, device: torch.device) -> None:
        self._columns = _column_multipliers(device)
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._by_column = torch.zeros_like(self._columns) if _sums_by_column(device) else None
        self._numel = 0
        self._product: Tensor | None = None  # kept, since new memory costs more than the multiplication

    def add(self, flat: Tensor) -> None:
        """Add the next piece: fp32, one dimension, contiguous."""
        assert self._numel % ROW == 0
        self._add_rows(self._numel // ROW, flat)
        self._numel += flat.numel()

    def add_at(self, position: int, flat: Tensor) -> None:
        """Add the elements from this position of the tensor on: the ranks of a worker each add what they hold.

        The `total`s of all ranks make the digest (`joined_digest`). Zeros in front and behind add nothing.
        """
        row, column = divmod(position, ROW)
        if column:
            flat = torch.nn.functional.pad(flat, (column, 0))
        self._add_rows(row, flat)

    @torch.no_grad()
    def _add_rows(self, row: int, flat: Tensor) -> None:
        """Add elements from the beginning of a row on."""
        assert flat.dtype == torch.float32 and flat.dim() == 1 and flat.is_contiguous()
        step = ROW * _ROWS_AT_ONCE.get(flat.device.type, _ROWS_AT_ONCE_ELSEWHERE)
        for start in range(0, flat.numel(), step):
            chunk = _whole_rows(flat[start : start + step])
            factors_of_rows = _row_multipliers(row + start // ROW, chunk.numel() // ROW, flat.device)
            if self._by_column is not None:
                self._by_column.addmv_(_as_integers(chunk).t(), factors_of_rows)
            else:
                self._total += (self._row_sums(chunk) * factors_of_rows).sum()

    def add_total(self, total: Tensor, numel: int) -> None:
        """Add a sum over all elements at once, which a GPU's kernel has computed with `factors`."""
        assert self._numel == 0
        self._total += total
        self._numel = numel

    def _row_sums(self, chunk: Tensor) -> Tensor:
        if chunk.is_cuda and has_triton():
            from diloco.core.kernels import weighted_row_sums

            return weighted_row_sums(chunk, self._columns)
        rows = _as_integers(chunk)
        if self._product is None or len(self._product) < len(rows):
            self._product = torch.empty_like(rows)
        return torch.mul(rows, self._columns, out=self._product[: len(rows)]).sum(1)

    @property
    def total(self) -> int:
        """Return the sum over all elements that were added, modulo 2^64."""
        total = self._total if self._by_column is None else self._total + (self._by_column * self._columns).sum()
        return int(total) & _64_BITS

    def hexdigest(self) -> str:
        """Sixteen hexadecimal digits for the bits and the length of all that was given."""
        return joined_digest([self.total], self._numel)


def joined_digest(totals: Iterable[int], numel: int) -> str:
    """Return the digest of a tensor of so many elements, from the `total`s of digests that have each of them once."""
    return f"{(sum(totals) ^ (numel * _GOLDEN)) & _64_BITS:016x}"


def _sums_by_column(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() <= _FEW_THREADS


def _whole_rows(chunk: Tensor) -> Tensor:
    """Pad a chunk with zeros to whole rows, or copy it to an even address, as a view as int64 needs them."""
    if chunk.numel() % ROW == 0 and chunk.data_ptr() % 8 == 0:
        return chunk
    padded = chunk.new_zeros(-(-chunk.numel() // ROW) * ROW)
    padded[: chunk.numel()] = chunk
    return padded


def _as_integers(chunk: Tensor) -> Tensor:
    return chunk.view(torch.int64).view(-1, ROW // 2)


def digest(flat: Tensor) -> str:
    """Sixteen hexadecimal digits for the bits and the length of `flat` (fp32, one dimension, contiguous)."""
    whole = Digest(flat.device)
    whole.add(flat)
    return whole.hexdigest()
