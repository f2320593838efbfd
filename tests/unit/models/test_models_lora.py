"""LoRA: only adapters are trained and saved; merged into the model or loaded by peft they compute the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from diloco.cli.config_parser import parse_config
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.models.hugging_face import HuggingFaceModel
from diloco.models.lora import LoraConfig
from diloco.models.registry import build_model, model_outline
from diloco.training.checkpoints.model import check_model_of
from diloco.training.checkpoints.resume import check_same_run
from diloco.training.config.run import InnerConfig, RunConfig
from diloco.training.config.run_file import merge
from support.pretrained_models import END, logits, make_folder, some_tokens


def adapted(folder: Path, lora: LoraConfig, seed: int = 0) -> HuggingFaceModel:
    torch.manual_seed(seed)
    model = build_model(f"hf:{folder}", vocab_size=1, sequence_length=1, lora=lora)
    assert isinstance(model, HuggingFaceModel)
    return model


def trained(model: HuggingFaceModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_the_merged_folder_and_the_adapter_compute_what_the_trained_model_does(family: str, tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", family)
    model = adapted(base, LoraConfig(rank=4))
    tokens = some_tokens(length=16)
    with torch.no_grad():
        before = model.eval()(tokens)
        torch.testing.assert_close(before, logits(base, tokens))  # B starts at zero
        for parameter in trained(model).values():
            parameter.normal_(std=0.1)
        after = model(tokens)
    assert not torch.allclose(before, after, atol=1e-2)
    model.save(tmp_path / "merged", tokenizer_path=base / "tokenizer.json", end_of_text=END)
    model.save_adapter(tmp_path / "adapter")
    torch.testing.assert_close(logits(tmp_path / "merged", tokens), after, atol=1e-5, rtol=1e-5)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, after, atol=1e-5, rtol=1e-5)


def test_only_adapters_of_the_named_modules_are_trained_and_all_workers_draw_the_same(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    model = adapted(base, LoraConfig(rank=2, targets="q_proj, v_proj"))
    names = trained(model)
    assert names and all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in names)
    again = trained(adapted(base, LoraConfig(rank=2, targets="q_proj, v_proj")))
    assert all(torch.equal(names[name], again[name]) for name in names)
    outline = model_outline(
        ModelChoice(f"hf:{base}"), vocab_size=1, sequence_length=1, lora=LoraConfig(rank=2, targets="q_proj,v_proj")
    )
    assert {n: p.shape for n, p in outline.named_parameters() if p.requires_grad} == {
        n: p.shape for n, p in names.items()
    }


def test_other_frozen_weights_are_another_model_to_the_workers(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path / "a"), make_folder(tmp_path / "b", seed=1)
    lora = LoraConfig(rank=2)
    assert adapted(first, lora).description == adapted(first, lora, seed=7).description
    assert adapted(first, lora).description != adapted(second, lora).description
    assert adapted(first, lora).description != adapted(first, LoraConfig(rank=2, alpha=1.0)).description


def test_a_checkpoint_is_not_put_beside_other_frozen_weights(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path / "a"), make_folder(tmp_path / "b", seed=1)
    saved, now = (adapted(folder, LoraConfig(rank=2)).description for folder in (first, second))
    checkpoint: Any = SimpleNamespace(folder=tmp_path, manifests=[SimpleNamespace(config={"model": saved})])
    check_model_of(checkpoint, saved)
    with pytest.raises(ConfigError, match=r"no longer that of the run's start \(the frozen weights differ\)"):
        check_model_of(checkpoint, now)
    with pytest.raises(ConfigError, match=r"saved with another model \(the frozen weights differ\)"):
        check_same_run(checkpoint, {"model": now})


def test_what_cannot_be_is_refused_with_the_remedy(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"lora\.targets = foo does not fit .* linear layers are .*q_proj"):
        adapted(base, LoraConfig(rank=2, targets="foo"))
    with pytest.raises(ConfigError, match=r"lora\.alpha = 3\.0 has no effect without LoRA: add --lora"):
        LoraConfig(alpha=3.0)
    with pytest.raises(ConfigError, match=r"lora\.rank = 0 must be at least 1"):
        LoraConfig(rank=0)
    with pytest.raises(ConfigError, match=r"model = tiny: give hf:NAME_OR_PATH"):
        RunConfig(lora=LoraConfig(rank=2))
    pretrained = ModelChoice(f"hf:{base}")
    with pytest.raises(ConfigError, match="Muon is for whole matrices"):
        RunConfig(model=pretrained, lora=LoraConfig(rank=2), inner=InnerConfig(optimizer="muon"))
    with pytest.raises(ConfigError, match="is for workers of one rank, and ranks = 2"):
        RunConfig(model=pretrained, lora=LoraConfig(rank=2), ranks="2")


@pytest.mark.parametrize(
    ("options", "rank"),
    [
        (["--lora"], 16),
        (["--lora", "8"], 8),
        (["--lora=8"], 8),
        (["--lora", "--lora.rank", "4"], 4),
        (["--lora.rank", "4"], 4),
        ([], None),
    ],
)
def test_the_short_option_is_a_rank(options: list[str], rank: int | None, tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    config = parse_config(merge([f"--model=hf:{base}", *options])[0])
    assert config.lora.rank == rank
    assert config.inner.lr == (5e-5 if rank is None else 2e-4)
