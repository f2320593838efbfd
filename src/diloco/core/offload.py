"""Anchors and outer momentum in pinned CPU memory, brought to the GPU a span at a time when an outer step needs them.

They are used once in H inner steps, and are two of DiLoCo's six copies of the model. With offload, GPU memory is that
of plain training and a few spans, and an outer step takes as long as the transfer: while one span is computed, the next
arrives and the previous one leaves, each on its own stream.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SPAN_ELEMENTS = 1 << 23
_SLOTS = 3  # one arriving, one worked on, one leaving


def pinned(numel: int) -> Tensor:
    return torch.zeros(numel, pin_memory=True)


class _Slot:
    """Memory on the GPU for one span of every buffer."""

    def __init__(self, count: int, elements: int, device: torch.device) -> None:
        self.buffers = [torch.empty(elements, device=device) for _ in range(count)]
        self.arrived, self.used, self.free = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]


class Staging:
    """Brings offloaded buffers of one size to the GPU, all together, span by span."""

    def __init__(self, buffers: int, elements: int, device: torch.device) -> None:
        self._slots = [_Slot(buffers, elements, device) for _ in range(_SLOTS)]
        self._arriving, self._leaving = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def visit(self, home: Sequence[Tensor], spans: Sequence[slice], *, write: bool) -> Iterator[list[Tensor]]:
        """Go through the spans of all `home` buffers, on the GPU, in order; with `write`, changes are copied back.

        On return everything has arrived: the CPU may read the buffers.
        """
        main = torch.cuda.current_stream()
        self._arriving.synchronize()
        self._leaving.synchronize()  # both are idle, unless the last visit was left in the middle
        for slot in self._slots:
            slot.free.record(main)
        for number in range(min(_SLOTS - 1, len(spans))):
            self._fetch(home, spans, number)
        for number, span in enumerate(spans):
            slot = self._slots[number % _SLOTS]
            staged = [buffer[: span.stop - span.start] for buffer in slot.buffers[: len(home)]]
            main.wait_event(slot.arrived)
            yield staged
            slot.used.record(main)
            self._leaving.wait_event(slot.used)
            with torch.cuda.stream(self._leaving):
                if write:
                    for buffer, values in zip(home, staged, strict=True):
                        buffer[span].copy_(values, non_blocking=True)
                slot.free.record(self._leaving)
            if number + _SLOTS - 1 < len(spans):
                self._fetch(home, spans, number + _SLOTS - 1)
        self._leaving.synchronize()

    def _fetch(self, home: Sequence[Tensor], spans: Sequence[slice], number: int) -> None:
        slot = self._slots[number % _SLOTS]
        span = spans[number]
        self._arriving.wait_event(slot.free)
        with torch.cuda.stream(self._arriving):
            for buffer, staged in zip(home, slot.buffers, strict=False):
                staged[: span.stop - span.start].copy_(buffer[span], non_blocking=True)
            slot.arrived.record(self._arriving)
