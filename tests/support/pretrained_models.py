"""Small models of transformers with random weights, in folders as `save_pretrained` writes them, and runs of them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from diloco.models.choice import ModelChoice
from diloco.models.registry import build_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.records.summary import Summary, summarize
from support.event_log import history_of

VOCAB = 320
LENGTH = 64
END = "<|endoftext|>"
_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("LlamaConfig", {**_LLAMA, "num_key_value_heads": 2}),
    "llama, tied": ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}),
    "qwen2": ("Qwen2Config", {**_LLAMA, "num_key_value_heads": 2}),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE, saved as transformers does it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["every worker trains alone and averages now and then"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_folder(folder: Path, family: str = "llama, grouped heads", *, seed: int = 0, **changes: Any) -> Path:
    """A model folder with its tokenizer. Weights are larger than at a start, so that every part of a model shows."""
    name, shape = FAMILIES[family]
    lengths = {} if family in ("gpt2", "mamba") else {"max_position_embeddings": LENGTH}
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    config = getattr(transformers, name)(**{"vocab_size": VOCAB, **shape, **lengths, **special, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers computes from a folder, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        result: torch.Tensor = model(tokens).logits
    return result


def some_tokens(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCAB - 20, (rows, length), generator=torch.Generator().manual_seed(1))


def make_run(folder: Path, config: RunConfig | None = None, *, model: str | None = None, **numbers: object) -> Summary:
    """A run folder as `diloco train` leaves it, without the training; returns its summary.

    `model`: by default a small Llama folder beside it, trained natively.
    """
    if model is None:
        model = str(make_folder(folder.parent / "base"))
    folder.mkdir()
    config = config or RunConfig(model=ModelChoice(model))
    (folder / "config.toml").write_text(to_toml(config))
    summary = summarize(config, history_of([])) | {"status": "complete", "error": None} | numbers
    (folder / "summary.json").write_text(json.dumps(summary))
    tokenizer = Path(model.removeprefix("hf:")) / "tokenizer.json"
    built = build_model(model, vocab_size=1, sequence_length=1)
    built.save(folder / "model", tokenizer_path=tokenizer, end_of_text=END)
    return summary
