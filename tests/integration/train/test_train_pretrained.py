"""A pre-trained model's folder in, two workers fine-tune it, a folder out that transformers loads with equal logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.cli.main import run
from diloco.models.registry import open_model
from support.pretrained_models import logits, make_folder, some_tokens
from support.train_runs import Run, write_text

pytestmark = pytest.mark.slow


def fine_tuned(model: str, tmp_path: Path, *options: str, rate: float = 3e-3) -> Run:
    """A run of two workers with nothing said about tokenizer or recipe but what keeps it short."""
    lines = write_text(tmp_path / "lines", lines=1500).read_text().splitlines()
    documents = ["\n".join(lines[at : at + 5]) for at in range(0, len(lines), 5)]
    text = tmp_path / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    folder = tmp_path / "run"
    short = ["--steps=24", "--H=8", f"--inner.lr={rate}", "--inner.warmup_steps=2", "--training.eval_windows=16"]
    place = [f"--data.source={text}", f"--data.cache_dir={tmp_path / 'cache'}", "--data.shards=4", f"--out={folder}"]
    small = ["--data.sequence_length=32", "--training.sample_tokens=5", "--device=cpu", "--threads=1"]
    command = ["train", f"--model={model}", *short, *place, *small, *options]
    with Run(folder, command) as started:
        assert started.code() == 0, started.errors
        assert started.errors == ""
        started.assert_nothing_is_left()
    summary = started.summary
    assert summary["status"] == "complete"
    assert len(set(summary["anchor_digests"])) == 1 and len(summary["anchor_digests"]) == 2
    assert summary["validation_perplexity"] < 0.5 * summary["initial_validation_perplexity"]
    return started


def check_export(run_folder: Path, base: Path, target: Path, *options: str) -> None:
    """What transformers loads from an export is the trained model, not the one it started from."""
    assert run(["export", str(run_folder), "--to", str(target), *options]) == 0
    tokens = some_tokens(length=32)
    with torch.no_grad():
        trained = open_model(run_folder / "model").eval()(tokens)
    for folder in (target, run_folder / "model"):
        torch.testing.assert_close(logits(folder, tokens), trained, atol=1e-5, rtol=0)
    assert not torch.allclose(logits(base, tokens), trained, atol=1e-2)
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(target)
    text = "every worker trains alone 🙂"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.decode(after(text)["input_ids"]) == text


def test_a_model_of_transformers_is_fine_tuned_by_two_workers_and_exported(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "gpt2")  # with dropout
    fine_tuned(f"hf:{base}", tmp_path)
    check_export(tmp_path / "run", base, tmp_path / "new", "--max-shard-size", "40KB")
    assert len(list((tmp_path / "new").glob("model-*.safetensors"))) > 1


def test_a_sharded_llama_folder_is_fine_tuned_natively_as_transformers_would(tmp_path: Path) -> None:
    make_folder(tmp_path / "whole", "llama, tied")
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(base, max_shard_size="30KB")
    AutoTokenizer.from_pretrained(tmp_path / "whole").save_pretrained(base)
    assert not (base / "model.safetensors").exists()
    native = fine_tuned(str(base), tmp_path)
    check_export(tmp_path / "run", base, tmp_path / "new")
    other = tmp_path / "other"
    other.mkdir()
    theirs = fine_tuned(f"hf:{base}", other)
    # The same training, computed twice: equal up to rounding.
    assert theirs.summary["validation_loss"] == pytest.approx(native.summary["validation_loss"], abs=1e-3)
    ours = load_file(native.folder / "model" / "model.safetensors")
    for name, tensor in load_file(theirs.folder / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, ours[name], atol=1e-3, rtol=1e-2)


def test_a_lora_of_two_workers_sends_and_saves_its_adapters_alone_and_is_resumed_and_exported(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "llama, tied")
    first = fine_tuned(f"hf:{base}", tmp_path, "--lora=4", "--checkpoint.interval=8", rate=0.03)
    summary = first.summary
    trained = summary["trainable_parameters"]
    assert 0 < trained < summary["parameters"] / 4
    rounds = [event for event in first.events if event["type"] == "round" and event["mean_norm"]]
    assert rounds and all(2 * trained <= event["bytes_sent"] < 2 * trained + 4096 for event in rounds)  # fp16
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-00000024/worker-0/*.safetensors")
    names = [name for name in load_file(saved) if name.startswith("model.")]
    assert names and all("lora_" in name for name in names)
    check_export(tmp_path / "run", base, tmp_path / "merged", "--checkpoint", "latest")
    assert run(["export", str(tmp_path / "run"), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    tokens = some_tokens(length=32)
    peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs = peft_model(input_ids=tokens).logits
    torch.testing.assert_close(theirs, logits(tmp_path / "run" / "model", tokens), atol=1e-4, rtol=1e-4)
    # The same run, without its last checkpoint and resumed, ends with the same bits.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000024")
    (tmp_path / "run" / "summary.json").unlink()
    with Run(tmp_path / "run", ["train", f"--resume={tmp_path / 'run'}"]) as resumed:
        assert resumed.code() == 0, resumed.errors
    assert resumed.summary["anchor_digests"] == summary["anchor_digests"]
