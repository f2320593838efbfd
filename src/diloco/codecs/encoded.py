"""An encoded vector: all parts of one outer gradient, or of a mean, as one block of bytes.

Workers send this. A worker encodes its outer gradient into it span by span; an engine exchanges whole parts and writes
the encoded mean into `vector.mean`; the worker decodes the mean span by span. With most codecs `vector.mean` is the
vector itself, so a round needs no second copy of the model. Where a mean has a codec of its own (`Codec.for_means`) it
is another vector. Its memory is there while a round needs it: from the first use until `give_back`.
"""

import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.core.fragments import PartLayout, span_elements
from diloco.memory import LARGE_BYTES, mapped, return_free_memory


class EncodedVector:
    """All parts of a vector, encoded. `data` is [parts, part_bytes] uint8, contiguous."""

    def __init__(
        self, codec: Codec, layout: PartLayout, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> None:
        """`pinned`: page-locked CPU memory, for copies from and to a GPU."""
        self.codec = codec
        self.layout = layout
        self.device = torch.device(device)
        self._pinned = pinned
        self.shape = (layout.num_parts, codec.part_bytes(layout.part_elements))
        self.num_bytes = self.shape[0] * self.shape[1]
        self._data: Tensor | None = None
        means = codec.for_means
        self.mean: EncodedVector = self if means is codec else EncodedVector(means, layout, device, pinned=pinned)
        """The vector in which an engine puts the mean of the round."""

    @property
    def data(self) -> Tensor:
        """The encoded parts: new memory, of any content, at the first use and after `give_back`."""
        if self._data is None:
            if self.device.type == "cpu" and not self._pinned and self.num_bytes >= LARGE_BYTES:
                return_free_memory()
                self._data = mapped(self.num_bytes).view(self.shape)
            else:
                self._data = torch.empty(self.shape, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)
        return self._data

    @data.setter
    def data(self, data: Tensor) -> None:
        self._data = data

    def give_back(self) -> None:
        """Free the memory after a round: its bytes are lost, the mean's too. Pinned memory is slow to get, and
        stays."""
        for vector in (self, self.mean):
            if not vector._pinned:
                vector._data = None

    def encode(self, first_part: int, values: Tensor) -> None:
        """Write consecutive parts from the flat fp32 `values`.

        The last part may be incomplete; it is padded with zeros. Values on a GPU are encoded there; the copy to
        memory on the CPU is asynchronous.
        """
        part = self.layout.part_elements
        rows = -(-values.numel() // part)
        if values.numel() < rows * part:
            values = torch.nn.functional.pad(values, (0, rows * part - values.numel()))
        out = self.data[first_part : first_part + rows]
        if values.device == out.device:
            self.codec.encode(values.view(rows, part), out)
            return
        encoded = torch.empty(out.shape, dtype=torch.uint8, device=values.device)
        self.codec.encode(values.view(rows, part), encoded)
        out.copy_(encoded, non_blocking=True)

    def decode(
        self, first_part: int, num_parts: int, device: torch.device | None = None, *, padded: bool = False
    ) -> Tensor:
        """Return the flat fp32 values of consecutive parts; `padded`: with the padding of the last one.

        They are on `device`, or where `data` is, and in scratch memory: use them before this thread's next call.
        """
        part = self.layout.part_elements
        device = device or self.data.device
        out = scratch("decoded", (num_parts, part), device)
        self.codec.decode(self.data[first_part : first_part + num_parts].to(device, non_blocking=True), out)
        return out.view(-1) if padded else out.view(-1)[: self.layout.numel - first_part * part]

    def squared_error(self, first_part: int, num_parts: int, values: Tensor) -> Tensor:
        """Return the squared error of these parts against the flat fp32 `values` that were encoded, and their squared
        norm."""
        error = self.decode(first_part, num_parts, values.device).sub_(values)
        return torch.stack([torch.linalg.vector_norm(error), torch.linalg.vector_norm(values)]).square()

    def is_finite(self, data: Tensor | None = None, share: tuple[int, int] = (0, 1)) -> bool:
        """Whether all values of this vector, or of other encoded bytes of the same layout, are finite.

        `share` is (i, n): look at the i-th of n shares of the parts only.
        """
        rows = (self.data if data is None else data).view(self.shape)
        index, shares = share
        rows = rows[len(rows) * index // shares : len(rows) * (index + 1) // shares]
        batch = max(1, span_elements(rows.device) // self.layout.part_elements)
        norms = []
        for first in range(0, len(rows), batch):
            encoded = rows[first : first + batch]
            values = scratch("decoded", (len(encoded), self.layout.part_elements), rows.device)
            self.codec.decode(encoded, values)
            norms.append(torch.linalg.vector_norm(values))
        return not norms or bool(torch.isfinite(torch.stack(norms)).all())


_blocks = threading.local()
_BLOCK_ELEMENTS = span_elements(torch.device("cpu"))


def scratch(use: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return contiguous fp32 memory of any content. This thread's next call for the same `use` may return the same
    memory.

    The allocator would return blocks of this size to the system and fault them in again, which costs more than the
    arithmetic done in them. Each thread has its own, because rounds are reduced beside training.
    """
    numel = torch.Size(shape).numel()
    if device.type != "cpu" or numel > _BLOCK_ELEMENTS:
        return torch.empty(shape, device=device)
    block: Tensor | None = getattr(_blocks, use, None)
    if block is None:
        # A separate mapping: inside the heap it would fragment the space where gradients are allocated and freed.
        block = torch.frombuffer(mmap.mmap(-1, 4 * _BLOCK_ELEMENTS), dtype=torch.float32)
        setattr(_blocks, use, block)
    return block[:numel].view(shape)
