"""Weights in one file or many are the same weights; shards are cut where they should be; damage is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diloco.errors import ConfigError
from diloco.models.native.model import NativeModel
from diloco.models.weights import StoredWeights, read_weights, write_weights
from support.pretrained_models import logits, make_folder, some_tokens

TENSORS = {f"layer.{i}": torch.arange(100.0) + i for i in range(5)} | {"count": torch.arange(3)}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder = tmp_path / "stored"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write(source: Path, target: Path, dtype: torch.dtype = torch.float32, most: int = 10**9) -> Path:
    target.mkdir()
    with StoredWeights(source) as weights:
        write_weights(weights, target, dtype, most)
    return target


@pytest.mark.parametrize(("most", "files"), [(10**9, 1), (900, 3), (800, 3), (799, 5), (1, 6)])
def test_shards_hold_as_much_as_they_may_and_every_tensor_once(
    stored: Path, tmp_path: Path, most: int, files: int
) -> None:
    target = write(stored, tmp_path / "new", most=most)
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) == files
    read = read_weights(target)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    if files > 1:
        assert shards[0].name == f"model-00001-of-{files:05d}.safetensors"
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 5 * 400 + 3 * 8
        assert {name: path.name for path in shards for name in load_file(path)} == index["weight_map"]
        sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in shards]
        assert all(size <= most or len(load_file(path)) == 1 for size, path in zip(sizes, shards, strict=True))


def test_floats_are_cast_and_whole_numbers_are_not(stored: Path, tmp_path: Path) -> None:
    read = read_weights(write(stored, tmp_path / "new", torch.bfloat16))
    assert {tensor.dtype for name, tensor in read.items() if name != "count"} == {torch.bfloat16}
    assert torch.equal(read["count"], TENSORS["count"])
    assert torch.equal(read["layer.3"], TENSORS["layer.3"].bfloat16())


def test_a_value_that_becomes_infinite_is_refused_with_its_tensor(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file({"fine": torch.ones(2), "large": torch.tensor([1.0, -70000.0])}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor large has the value 70000.*float16: use bfloat16"):
        write(tmp_path / "m", tmp_path / "new", torch.float16)
    write(tmp_path / "m", tmp_path / "other", torch.bfloat16)


def test_progress_tells_the_shards_written_and_all(stored: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with StoredWeights(stored) as weights:
        write_weights(weights, tmp_path, torch.float32, 900, lambda done, total: reports.append((done, total)))
    assert reports == [(1, 3), (2, 3), (3, 3)]


def test_shards_of_transformers_load_natively_and_ours_load_in_transformers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "whole", "llama, tied")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    tokens = some_tokens()
    expected = logits(folder, tokens)
    with torch.no_grad():
        torch.testing.assert_close(NativeModel.load(tmp_path / "theirs")(tokens), expected, atol=1e-5, rtol=0)
    ours = write(folder, tmp_path / "ours", most=20_000)
    (ours / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert len(list(ours.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(ours, tokens), expected)


def test_damaged_shards_and_indexes_are_refused_with_their_path(stored: Path, tmp_path: Path) -> None:
    folder = write(stored, tmp_path / "new", most=900)
    index = folder / "model.safetensors.index.json"
    content = index.read_text()
    second = folder / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"model-00002-of-00003.safetensors cannot be read"):
        read_weights(folder)
    second.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003.safetensors does not exist.*whole model folder"):
        read_weights(folder)
    second.write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"has tensor \S+, which .* has too"):
        read_weights(folder)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="has no weight_map"):
        read_weights(folder)
    index.write_text(content.replace("model-00003-of-00003", "../model-00003-of-00003"))
    with pytest.raises(ConfigError, match=r"'\.\./model-00003.*must be in its folder"):
        read_weights(folder)
