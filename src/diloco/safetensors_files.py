"""The safetensors format, for files that are streamed and hashed and for shared memory.

    8 bytes: length of the header, little-endian | header: JSON, padded with spaces | the tensors' bytes

The safetensors library writes a whole file by itself or builds it in memory; here the caller does the writing. To read,
use the library: it checks what it reads.
"""

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from diloco.errors import DiLoCoError

_FETCH_BYTES = 1 << 24

DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def make_header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Tensor]]:
    """Return length and header, and the tensors in the order of the file: wide types first, so that all are aligned."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in ordered.items():
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise DiLoCoError(f"'{name}' is a tensor of {tensor.dtype}, which cannot be saved: use one of {known}")
        end = position + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered


def file_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield a whole file, to be written chunk by chunk; at most one tensor is copied at a time."""
    header, ordered = make_header(tensors, metadata)
    yield memoryview(header)
    fetch = _Fetch()
    for tensor in ordered.values():
        if tensor.is_cuda:
            yield from fetch.chunks(tensor.detach())
        elif tensor.numel():
            yield tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


class _Fetch:
    """Brings bytes from a GPU, on a stream beside that of training: while one piece is written, the next arrives."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield the tensor as it was when the first one was asked for. A chunk is valid until the next but one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            self._buffers = [torch.empty(_FETCH_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        with torch.cuda.stream(self._stream):
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            pieces = torch.split(flat, _FETCH_BYTES) if tensor.numel() else ()
        begun = []
        for number, piece in enumerate(pieces):
            begun.append(self._begin(piece, self._buffers[number % 2]))
            if number:
                yield _arrived(*begun.pop(0))
        if begun:
            yield _arrived(*begun.pop())

    def _begin(self, piece: Tensor, buffer: Tensor) -> "tuple[Tensor, torch.cuda.Event]":
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            copied = buffer[: piece.numel()].copy_(piece, non_blocking=True)
            event.record()
        return copied, event


def _arrived(copied: Tensor, event: "torch.cuda.Event") -> memoryview:
    event.synchronize()
    return copied.numpy().data
