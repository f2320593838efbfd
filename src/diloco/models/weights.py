"""The tensors of a model folder: safetensors, in one file or in shards with an index, read and written one by one.

Refuses damaged files, a tensor that is in two files, and values that become infinite in the type they are written in.
Nothing is unpickled.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diloco.errors import ConfigError
from diloco.models.pretrained import INDEX_FILE, WEIGHTS_FILE, weight_files

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a model folder, in the types they are stored in."""
    with StoredWeights(folder) as stored:
        return {name: stored.tensor(name) for name in stored.sizes}


class StoredWeights:
    """The tensors of a model folder, each read when it is asked for; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[Path, Any]] = {}
        self.sizes: dict[str, tuple[str, int]] = {}
        """Stored type and number of values of every tensor."""
        with ExitStack() as stack:
            for path in weight_files(folder):
                with _readable(path):
                    self._add(path, stack.enter_context(safe_open(path, framework="pt")))
            self._stack = stack.pop_all()  # all is well: the files stay open

    def _add(self, path: Path, file: Any) -> None:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if name in self._files:
                raise ConfigError(f"{path} has tensor {name}, which {self._files[name][0].name} has too")
            self._files[name] = (path, file)
            part = file.get_slice(name)
            self.sizes[name] = (part.get_dtype(), math.prod(part.get_shape()))

    def __enter__(self) -> "StoredWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        path, file = self._files[name]
        with _readable(path):
            tensor: Tensor = file.get_tensor(name)
        return tensor


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Inside, an error of safetensors becomes a ConfigError that names the file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}): restore the file") from error


@dataclass(frozen=True)
class _Shard:
    name: str
    tensors: list[str]


def write_weights(
    stored: StoredWeights,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the tensors into `folder` as `dtype` (whole numbers stay as they are), with one shard in memory at a time.

    One file if it fits `max_shard_bytes`, otherwise shards and their index, as `transformers` writes them. `progress`
    is called with the shards written and all.
    """
    sizes = {name: _size_bytes(name, *size, dtype) for name, size in stored.sizes.items()}
    shards = _shards(sizes, max_shard_bytes)
    for number, shard in enumerate(shards):
        tensors = {name: _cast(name, stored.tensor(name), dtype) for name in shard.tensors}
        save_file(tensors, folder / shard.name, metadata={"format": "pt"})
        if progress is not None:
            progress(number + 1, len(shards))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[_Shard]:
    """Names in their order, cut wherever the next tensor would not fit; one that never fits has a shard to itself."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return [_Shard(WEIGHTS_FILE, groups[0])]
    return [_Shard(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups)]


def _size_bytes(name: str, stored: str, values: int, dtype: torch.dtype) -> int:
    if stored in _FLOATS:
        return values * dtype.itemsize
    if stored not in _OTHERS:
        raise ConfigError(f"tensor {name} is stored as {stored}: it cannot be written as {dtype}")
    return values * _OTHERS[stored]


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    if bool(tensor.isfinite().all()) and not bool(cast.isfinite().all()):
        largest = float(tensor.abs().max())
        raise ConfigError(
            f"tensor {name} has the value {largest:g}, which is infinite in {str(dtype).removeprefix('torch.')}: "
            f"use bfloat16 or float32"
        )
    return cast
