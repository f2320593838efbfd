"""The largest values of every chunk, with packed indices: SparseLoCo (arXiv 2508.15706), made for error feedback.

A contribution has the 64 largest of every 4,096 values, with 12 bits for the index and 2 for the value: 0.03 bytes a
value. The mean of several is their union; its 128 largest of 4,096 travel, with 4 bits for the value: 0.06 bytes. So
the mean of two workers loses no index, and that of more keeps the largest (docs/codecs.md has the figures).

Of values of the same size the one with the lower index comes first, on every device. Indices ascend within
a chunk. A part's last chunk may be shorter, and has as large a share of its values.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.blocks import divided
from diloco.codecs.two_bits import mean_of
from diloco.core.fragments import PART_QUANTUM

CHUNK = 4096
assert CHUNK % PART_QUANTUM == 0


class _Sparse(Codec):
    """Layout of a part: chunk after chunk, each its indices, its values, two fp32 numbers that scale the values."""

    chosen: ClassVar[int]
    """Values of a whole chunk."""
    value_bits: ClassVar[int]

    def part_bytes(self, elements: int) -> int:
        return sum(count * self._chunk_bytes(size) for size, count in _chunks(elements))

    def _count(self, size: int) -> int:
        return size * self.chosen // CHUNK

    def _chunk_bytes(self, size: int) -> int:
        return self._count(size) * (12 + self.value_bits) // 8 + 8

    def _split(self, values: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through chunks of the same size at a time: values [rows, chunks, size] and their bytes [rows, chunks,
        …]."""
        first = 0
        first_byte = 0
        for size, count in _chunks(values.shape[1]):
            width = self._chunk_bytes(size)
            chunks = torch.unflatten(values[:, first : first + size * count], 1, (count, size))
            yield chunks, torch.unflatten(data[:, first_byte : first_byte + width * count], 1, (count, width))
            first += size * count
            first_byte += width * count

    def encode(self, values: Tensor, out: Tensor) -> None:
        for chunks, data in self._split(values, out):
            flat = chunks.reshape(-1, chunks.shape[2])
            indices = largest(flat, self._count(flat.shape[1]))
            codes, scales = self._quantise(flat.gather(1, indices))
            packed = [_pack_indices(indices), _pack(codes, self.value_bits), scales.view(torch.uint8)]
            data.copy_(torch.cat(packed, dim=1).view(data.shape))

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.zero_()
        for chunks, encoded in self._split(out, data):
            count = self._count(chunks.shape[2])
            flat = encoded.reshape(-1, encoded.shape[2])
            sizes = [count * 12 // 8, count * self.value_bits // 8, 8]
            indices, codes, scales = torch.split_with_sizes(flat, sizes, dim=1)
            values = self._restore(_unpack(codes, self.value_bits), scales.contiguous().view(torch.float32))
            places = _unpack_indices(indices).clamp_(max=chunks.shape[2] - 1)  # bytes of others may say anything
            places, values = _ascending(places, values)
            chunks.scatter_(2, places.view(*chunks.shape[:2], count), values.view(*chunks.shape[:2], count))

    @abstractmethod
    def _quantise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise values [chunks, count] to codes, uint8, and two numbers [chunks, 2] fp32."""

    @abstractmethod
    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values of such codes."""

    def error_bound(self, values: Tensor) -> Tensor:
        bounds = []
        for chunks, _ in self._split(values, values.new_empty(len(values), self.part_bytes(values.shape[1]))):
            sizes = chunks.double().abs()
            top = sizes.topk(self._count(chunks.shape[2]), dim=2).values
            most, least = top[..., :1], top[..., -1:]
            bound = torch.where(sizes < least, sizes, torch.maximum(sizes.where(sizes == least, 0.0), most - least))
            bounds.append((bound * (1 + 2.0**-20) + 2.0**-140).flatten(1))
        return torch.cat(bounds, dim=1)


class TopK(_Sparse):
    """64 of 4,096 values, 2 bits each: a sign and one of two sizes, the means of the larger and the smaller ones.

    |error| ≤ |x| for a value that is left out, else largest − smallest of the chosen ones.
    """

    name = "topk"
    means_drop_values = True
    chosen = 64
    value_bits = 2

    def __init__(self) -> None:
        super().__init__(for_means=TopKMean())

    def _quantise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        sizes = values.abs()
        large = sizes >= _mean(sizes, torch.ones_like(sizes))
        scales = [_mean(sizes, torch.where(group, 1.0, 0.0)) for group in (~large, large)]
        codes = large.to(torch.uint8) + 2 * (values < 0).to(torch.uint8)
        return codes, torch.cat(scales, dim=1)

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        sizes = torch.where((codes & 1).bool(), scales[:, 1:], scales[:, :1])
        return torch.where((codes & 2).bool(), -sizes, sizes)


class TopKMean(_Sparse):
    """128 of 4,096 values, 4 bits each: a sign and zero or one of seven sizes, evenly from the smallest to the largest.

    |error| ≤ |x| for a value that is left out, else a twelfth of (largest − smallest). The norm grows most (by 1.55)
    if one value is large and all others are half a step.
    """

    name = "topk mean"
    norm_slack = 1.6
    chosen = 128
    value_bits = 4

    def _quantise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        sizes = values.abs()
        most = sizes.amax(dim=1, keepdim=True)
        least = torch.where(sizes == 0, torch.inf, sizes).amin(dim=1, keepdim=True).minimum(most)
        step = divided(most - least, 6)
        level = torch.where(step == 0, 0.0, (sizes - least) / step).round().clamp(0, 6) + 1
        codes = torch.where(sizes == 0, 0.0, level).to(torch.uint8) + 8 * (values < 0).to(torch.uint8)
        return codes, torch.cat([least, most], dim=1)

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        least, most = scales[:, :1], scales[:, 1:]
        level = (codes & 7).to(torch.float32)
        sizes = ((level - 1) * divided(most - least, 6) + least).minimum(most)
        sizes = torch.where(level == 0, 0.0, sizes)
        return torch.where((codes & 8).bool(), -sizes, sizes)


def _chunks(elements: int) -> list[tuple[int, int]]:
    """Return (size, how many) of a part's chunks, in order; the shorter last one is by itself."""
    whole, rest = divmod(elements, CHUNK)
    return [(size, count) for size, count in ((CHUNK, whole), (rest, 1)) if size * count]


def largest(values: Tensor, count: int) -> Tensor:
    """Find the indices of the largest |values| [rows, elements] of each row as [rows, count], ascending."""
    sizes = values.abs()
    top, indices = torch.topk(sizes, count, dim=1, sorted=True)
    indices = indices.sort(dim=1).values
    least = top[:, -1:]
    tied = torch.nonzero((sizes >= least).sum(dim=1) != count).flatten()
    if len(tied):  # torch.topk may take any of several values of the same size
        sizes = sizes[tied]
        least = least[tied]
        above = sizes > least
        same = sizes == least
        room = count - above.sum(dim=1, keepdim=True)
        chosen = above | (same & (same.cumsum(dim=1) <= room))
        indices[tied] = _first_true(chosen, count)
    return indices


def _first_true(chosen: Tensor, count: int) -> Tensor:
    """Find the indices of the first `count` true elements of each row; other ones where there are fewer (NaN only)."""
    return torch.sort(~chosen, dim=1, stable=True).indices[:, :count].sort(dim=1).values


def _mean(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen sizes of each row as [rows, 1], the same bits everywhere; 0 if none is chosen."""
    width = 64  # a power of two; rows of shorter chunks are filled up with zeros
    sizes, chosen = (torch.nn.functional.pad(values, (0, width - values.shape[1])) for values in (sizes, chosen))
    share = mean_of(chosen)
    mean = mean_of(sizes * chosen) / torch.where(share == 0, 1.0, share)
    return mean.minimum(sizes.amax(dim=1, keepdim=True))


def _ascending(places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Repair indices [rows, count] that do not ascend, as `encode` writes them. An index that is not above all before
    it counts for nothing, so that bytes of others have one meaning: of two values with one index any could win."""
    if not places.is_cuda and bool((places[:, 1:] > places[:, :-1]).all()):
        return places, values
    above = torch.ones_like(places, dtype=torch.bool)
    above[:, 1:] = places[:, 1:] > places.cummax(dim=1).values[:, :-1]
    positions = torch.arange(places.shape[1], device=places.device).expand_as(places)
    last = torch.where(above, positions, 0).cummax(dim=1).values  # the others repeat the last one that counts
    return places.gather(1, last), values.gather(1, last)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, count] codes of 2 or 4 bits as [rows, count · bits / 8]: byte j has code j, code j + n/2, …"""
    pieces = codes.chunk(8 // bits, dim=1)
    packed = pieces[0].clone()
    for number, piece in enumerate(pieces[1:], 1):
        packed |= piece << (bits * number)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * number)) & mask for number in range(8 // bits)], dim=1)


def _pack_indices(indices: Tensor) -> Tensor:
    """Pack indices, 12 bits each: index j and index j + n/2 in three bytes, which are n/2 apart."""
    first, second = indices.to(torch.int16).chunk(2, dim=1)
    middle = (first >> 8) | ((second & 15) << 4)
    return torch.cat([first & 255, middle, second >> 4], dim=1).to(torch.uint8)


def _unpack_indices(packed: Tensor) -> Tensor:
    low, middle, high = packed.to(torch.int64).chunk(3, dim=1)
    return torch.cat([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1)
