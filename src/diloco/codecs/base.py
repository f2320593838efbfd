"""The codec contract: fp32 values to bytes and back, part by part.

A codec is elementwise or block-wise within one part, so the bytes of a part depend on nothing else; its sizes are a
function of the part's size alone, so that receivers know what to expect. It gets a batch of parts at once ([rows,
elements]) and writes into memory it is given. It never sees the model: the outer gradient is computed in fp32
before it comes here, and means are accumulated in fp32 after.

Every codec states a bound on its error for any finite input, and the property tests hold it to that.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """[rows, elements] fp32 <-> [rows, part_bytes(elements)] uint8; elements is a multiple of PART_QUANTUM."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    """Decoding gives exactly the bits that were encoded."""
    stable: ClassVar[bool] = False
    """Decoded values encode to the same bytes again."""
    norm_slack: ClassVar[float] = 1.1
    """The decoded values of any finite input have at most this many times its norm: a swarm refuses longer ones."""

    means_drop_values: ClassVar[bool] = False
    """A mean may lack values that were sent; with error feedback the workers that sent them send them again."""

    def __init__(self, for_means: "Codec | None" = None) -> None:
        self.for_means: Codec = for_means or self
        """The codec of the mean of such contributions. A mean of sparse vectors has more values than each of them."""

    @abstractmethod
    def part_bytes(self, elements: int) -> int:
        """Return the exact size of one encoded part; a multiple of 4, so that rows stay aligned."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write `values` [rows, elements] fp32 into `out` [rows, part_bytes] uint8."""

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of `data` [rows, part_bytes] uint8 into `out` [rows, elements] fp32."""

    @abstractmethod
    def error_bound(self, values: Tensor) -> Tensor:
        """Bound |decode(encode(x)) − x| for finite `values` [rows, elements], element by element."""

    def error_norm(self, values: Tensor) -> Tensor:
        """Return the norm of each row of `error_bound`, or little more; a codec may have a faster way to it."""
        norms: Tensor = torch.linalg.vector_norm(self.error_bound(values).float(), dim=1)
        return norms
