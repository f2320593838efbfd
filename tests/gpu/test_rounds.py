"""Rounds and checkpoints of workers on a GPU: the bytes are those of the CPU. Needs a CUDA device."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.atomic_files import digest_file, replace_file
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import CODECS, codec
from diloco.core.fragments import PartLayout
from diloco.engines import reduction
from diloco.engines.base import Engine
from diloco.engines.rounds import Contribution, RoundKey
from diloco.outer.tensors import pieces_of
from diloco.safetensors_files import file_chunks
from diloco.training.checkpoints import store
from support.processes import in_processes
from support.threads import in_threads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUMEL = 700 * 1024 + 37


def means(engine: Engine, device: str) -> dict[str, bytes]:
    """With ever smaller waves, and every codec."""
    found = {}
    for sequence, name in enumerate(CODECS):
        reduction._MIN_WAVE_BYTES_PER_WORKER = 1 << (18 - 3 * (sequence % 3))
        tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(engine.worker)) * (engine.worker + 1)
        vector = EncodedVector(codec(name), PartLayout(NUMEL), device)
        vector.encode(0, tensor.to(device))
        contribution = Contribution(vector, 1.0 + engine.worker, float(tensor.norm()), "same", "same", 1000.0)
        result = engine.start_round(RoundKey(sequence, 0), contribution, 60.0).wait()
        found[name] = result.mean.data.cpu().numpy().tobytes()
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_means_of_vectors_on_a_gpu_are_the_bytes_of_those_on_the_cpu(workers: int) -> None:
    on_cpu = in_threads(workers, lambda engine: means(engine, "cpu"))
    for told in in_processes(workers, means, "cuda"):
        assert told == on_cpu[0]


@pytest.mark.parametrize("room", [True, False], ids=["within the GPU", "to pinned memory"])
def test_a_snapshot_does_not_follow_the_training(room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_has_room", lambda _: room)
    tensors = {"a": torch.randn(5000, 4099, device="cuda"), "b": torch.arange(7.0), "c": torch.randn(3, 5).cuda().t()}
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    copies, wait = store.take_snapshot({name: pieces_of(tensor) for name, tensor in tensors.items()})
    for tensor in tensors.values():
        tensor.zero_()
    wait()
    assert copies["a"].pieces[0].tensor.is_cuda == room
    with replace_file(tmp_path / "file") as file:
        for chunk in file_chunks({name: copy.pieces[0].tensor for name, copy in copies.items()}):
            file.write(chunk)
        digest = file.finish()
    saved = load_file(tmp_path / "file")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    assert digest == digest_file(tmp_path / "file")


def test_a_tensor_is_written_as_the_stream_before_left_it(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 26, device="cuda")
    for _ in range(200):
        tensor += 1  # still running when the writing begins
    (tmp_path / "file").write_bytes(b"".join(bytes(chunk) for chunk in file_chunks({"t": tensor})))
    assert bool((load_file(tmp_path / "file")["t"] == 200).all())
