"""Compiling and recomputing change how a model computes in training, and nothing of what."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.models.base import LanguageModel
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.training.compute import blocks, prepare
from diloco.training.config.run import ComputeConfig

CPU = torch.device("cpu")


def make() -> NativeModel:
    torch.manual_seed(0)
    return NativeModel(preset("tiny", vocab_size=64, max_sequence_length=16))


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(1))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was given to torch.compile, which needs a C++ compiler that a test machine may not have."""
    given: list[Any] = []

    def compile_(function: Any, *, dynamic: bool) -> Any:
        given.append(function)
        calls = [0]

        def counted(*inputs: Any, **more: Any) -> Any:
            calls[0] += 1
            counted.calls = calls[0]  # type: ignore[attr-defined]
            return function(*inputs, **more)

        given.append(counted)
        return counted

    monkeypatch.setattr(torch, "compile", compile_)
    return given


def test_recomputed_activations_give_the_same_gradients_and_the_same_names() -> None:
    plain, recomputing = make(), make()
    calls = []
    recomputing.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    prepare(recomputing, ComputeConfig(checkpoint_activations=True), CPU)
    expected, found = gradients(plain), gradients(recomputing)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == 2, "a block computes a second time in the backward pass"
    assert recomputing.state_dict().keys() == plain.state_dict().keys()


def test_compiling_takes_the_body_as_a_whole_and_only_in_training(compiled: list[Any]) -> None:
    model = make()
    prepare(model, ComputeConfig(compile=True), CPU)
    gradients(model)
    assert compiled[1].calls == 1
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64))
    assert compiled[1].calls == 1


def test_a_sharded_model_is_compiled_block_by_block(compiled: list[Any]) -> None:
    model = make()
    prepare(model, ComputeConfig(compile=True), CPU, sharded=True)
    gradients(model)
    assert [counted.calls for counted in compiled[1::2]] == [1] * len(blocks(model))


def test_on_a_cpu_nothing_is_compiled_unless_asked_for(compiled: list[Any]) -> None:
    prepare(make(), ComputeConfig(), CPU)
    assert not compiled


def test_recomputing_a_model_without_blocks_is_refused() -> None:
    model = make()
    model.model.layers = torch.nn.Sequential(*model.model.layers)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="no list of blocks"):
        prepare(model, ComputeConfig(checkpoint_activations=True), CPU)
