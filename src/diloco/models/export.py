"""Exports a model folder: any float type, shards of a given size, all files that `transformers` expects.

Works on files, tensor by tensor, for every kind of model: nothing is computed, and at most one shard is in memory. The
new folder appears complete or not at all, and never replaces anything.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from diloco.models.folders import check_unused, replace_model_folder, write_json
from diloco.models.lora import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from diloco.models.pretrained import CONFIG_FILE, is_local, read_json
from diloco.models.tokenizer_files import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, copy_tokenizer
from diloco.models.weights import StoredWeights, write_weights

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
CARD_FILE = "README.md"
GENERATION_FILE = "generation_config.json"


def export_model(
    source: Path,
    target: Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16"],
    max_shard_bytes: int,
    card: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the model folder `source` to the new folder `target`, with `card` as its README.md."""
    target = target.expanduser().resolve()
    check_unused(target)
    config = read_json(source / CONFIG_FILE)
    with StoredWeights(source) as stored, replace_model_folder(target) as new:
        write_weights(stored, new, getattr(torch, dtype), max_shard_bytes, progress)
        # transformers 5 reads dtype, transformers 4 torch_dtype.
        write_json(new / CONFIG_FILE, {**config, "dtype": dtype, "torch_dtype": dtype})
        copy_tokenizer(source, new)
        if not (new / GENERATION_FILE).exists():
            write_json(new / GENERATION_FILE, {k: v for k, v in config.items() if k.endswith("_token_id")})
        if not (new / SPECIAL_TOKENS_FILE).exists() and (new / TOKENIZER_CONFIG_FILE).exists():
            write_json(new / SPECIAL_TOKENS_FILE, _special_tokens(read_json(new / TOKENIZER_CONFIG_FILE)))
        (new / CARD_FILE).write_text(card, encoding="utf-8")


def export_adapter(adapter: Path, model: Path, target: Path, *, card: str) -> None:
    """Write the adapters of a LoRA to the new folder `target`, with the tokenizer of the `model` folder. The name of
    the model that they belong to is published, so of a local path only the last part is kept."""
    target = target.expanduser().resolve()
    check_unused(target)
    config = read_json(adapter / ADAPTER_CONFIG_FILE)
    base = str(config["base_model_name_or_path"])
    with replace_model_folder(target) as new:
        shutil.copyfile(adapter / ADAPTER_WEIGHTS_FILE, new / ADAPTER_WEIGHTS_FILE)
        published_name = Path(base).name if is_local(f"hf:{base}") else base
        write_json(new / ADAPTER_CONFIG_FILE, config | {"base_model_name_or_path": published_name})
        copy_tokenizer(model, new)
        (new / GENERATION_FILE).unlink(missing_ok=True)  # the model's, not the adapters'
        (new / CARD_FILE).write_text(card, encoding="utf-8")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in _SPECIAL if config.get(name) is not None}
