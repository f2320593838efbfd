"""Files of tensors: every dtype bit for bit, cut by rows in any way and put together in any other, never unpickled."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco.atomic_files import FileDigest, digest_file, replace_file
from diloco.errors import CheckpointError
from diloco.outer.tensors import TensorPiece, TensorPieces, pieces_of
from diloco.training.checkpoints.store import take_snapshot
from diloco.training.checkpoints.tensor_files import read_tensors, saved_tensors, write_tensors

TENSORS = {
    "weight": torch.randn(5, 3),
    "scalar": torch.tensor(3.5),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "bf16": torch.randn(4).bfloat16(),
    "half": torch.randn(2, 2, 2).half(),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "large": torch.tensor([2**60 + 1]),
    "transposed": torch.randn(3, 4).t(),
    "slice": torch.randn(8)[2:5],
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "double": torch.randn(2, dtype=torch.float64),
}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def as_pieces(tensors: dict[str, Tensor]) -> dict[str, TensorPieces]:
    return {name: pieces_of(tensor) for name, tensor in tensors.items()}


def write(path: Path, tensors: dict[str, TensorPieces]) -> FileDigest:
    with replace_file(path) as file:
        write_tensors(file, tensors)
        return file.finish()


def written(folder: Path) -> Path:
    write(folder / "rank-0.safetensors", as_pieces(TENSORS))
    return folder


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    written(tmp_path)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_tensors(tmp_path, as_pieces(loaded))
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {n: bits(t) for n, t in TENSORS.items()}
    told = saved_tensors(tmp_path)
    assert {name: (data.shape, data.dtype) for name, data in told.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()
    }


def test_the_files_are_safetensors_and_their_size_and_digest_are_told(tmp_path: Path) -> None:
    told = write(tmp_path / "rank-0.safetensors", as_pieces(TENSORS))
    assert told == digest_file(tmp_path / "rank-0.safetensors")
    loaded = load_file(tmp_path / "rank-0.safetensors")
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {n: bits(t) for n, t in TENSORS.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_them_with_its_own_reader(tmp_path: Path) -> None:
    written(tmp_path)
    names = ["weight", "bf16", "bytes", "large"]
    loaded = {name: torch.zeros_like(TENSORS[name]) for name in names}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(bits(loaded[name]) == bits(TENSORS[name]) for name in names)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    written(tmp_path)
    read_tensors(tmp_path, as_pieces({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}))


def cut(tensor: Tensor, cuts: list[int]) -> list[TensorPieces]:
    """One rank's rows each; some ranks may have none."""
    bounds = [0, *sorted(cuts), len(tensor)]
    zeros = (0,) * (tensor.dim() - 1)
    return [
        TensorPieces(tuple(tensor.shape), tensor.dtype, (TensorPiece((a, *zeros), tensor[a:b]),) if b > a else ())
        for a, b in pairwise(bounds)
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 7), max_size=4), st.lists(st.integers(0, 7), max_size=4), st.sampled_from([1, 2, 3]))
def test_rows_that_were_cut_in_one_way_are_read_in_any_other(
    tmp_path: Path, written_cuts: list[int], read_cuts: list[int], dims: int
) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    whole = torch.randn(7, *([3, 2][: dims - 1]))
    for rank, mine in enumerate(cut(whole, written_cuts)):
        write(tmp_path / f"rank-{rank}.safetensors", {"w": mine})
    loaded = torch.zeros_like(whole)
    for mine in cut(loaded, read_cuts):
        read_tensors(tmp_path, {"w": mine})
    assert bits(loaded) == bits(whole)


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[Any]:
    """As if this process were one of several; nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def shard(whole: Tensor, mesh: Any, rank: int, size: int) -> DTensor:
    rows = -(-len(whole) // size)
    local = whole[rank * rows : (rank + 1) * rows].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 2)])
def test_dtensors_of_so_many_ranks_are_loaded_by_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    whole = torch.randn(7, 2)
    for rank in range(before):
        with rank_of(rank, before) as mesh:
            write(tmp_path / f"rank-{rank}.safetensors", {"w": pieces_of(shard(whole, mesh, rank, before))})
    loaded = []
    for rank in range(after):
        with rank_of(rank, after) as mesh:
            mine = shard(torch.zeros_like(whole), mesh, rank, after)
            read_tensors(tmp_path, {"w": pieces_of(mine)})
            loaded.append(mine.to_local())
    assert torch.equal(torch.cat(loaded), whole)


def test_a_copy_to_write_from_does_not_follow_the_training(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    staged, wait = take_snapshot({"t": pieces_of(tensor)})
    tensor.zero_()
    wait()
    write(tmp_path / "rank-0.safetensors", staged)
    assert load_file(tmp_path / "rank-0.safetensors")["t"].tolist() == [1, 1, 1]


def test_what_is_missing_of_another_shape_or_there_in_part_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "rank-1.safetensors", {"w": cut(torch.randn(6, 2), [3])[1]})
    with pytest.raises(CheckpointError, match=r"'v' is missing in the checkpoint, but \(2,\) is needed here"):
        read_tensors(tmp_path, as_pieces({"v": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"'w' has the shape \(6, 2\) in the checkpoint, but \(2, 6\)"):
        read_tensors(tmp_path, as_pieces({"w": torch.zeros(2, 6)}))
    with pytest.raises(CheckpointError, match="'w' is in the checkpoint in part only"):
        read_tensors(tmp_path, as_pieces({"w": torch.zeros(6, 2)}))
