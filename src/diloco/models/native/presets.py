"""Named model shapes. To add one: an entry here, a row in docs/models.md.

`60m`, `150m`, `400m` have the dimensions of Table 1 of the DiLoCo paper (arXiv 2311.08105) and its sequence
length. The table gives no width for the feed-forward layers. Chinchilla-style layers have two matrices of
width 4 · hidden; ours are SwiGLU, with three of width 8/3 · hidden (rounded up to a multiple of 128), which
is the same number of parameters. With tied embeddings the models then have 59M, 151M and 389M parameters.

`llama-150m` and `llama-1b` are the models of OpenDiLoCo (arXiv 2407.07852): its configs/config_150m.json and
config_1b.json, with the defaults of `LlamaConfig` for what these leave out, but the sequence length of 1,024
that it trained with. With both embeddings the smaller one has 215M parameters.

This file imports no torch.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig

_MULTIPLE = 32  # of a feed-forward width that follows from hidden_size

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=352,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_sequence_length=128,
        tie_embeddings=True,
    ),
    "60m": ModelConfig(
        vocab_size=32000,
        hidden_size=896,
        intermediate_size=2432,
        num_layers=3,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        max_sequence_length=1024,
        tie_embeddings=True,
    ),
    "150m": ModelConfig(
        vocab_size=32000,
        hidden_size=896,
        intermediate_size=2432,
        num_layers=12,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        max_sequence_length=1024,
        tie_embeddings=True,
    ),
    "400m": ModelConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4096,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=128,
        max_sequence_length=1024,
        tie_embeddings=True,
    ),
    "llama-150m": ModelConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2688,
        num_layers=12,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        max_sequence_length=1024,
        tie_embeddings=False,
    ),
    "llama-1b": ModelConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        head_dim=64,
        max_sequence_length=1024,
        tie_embeddings=False,
    ),
}


def preset(
    name: str,
    *,
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
    shape: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Return the named shape, with the tokenizer's vocabulary, the run's sequence length and the numbers of `shape`."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ConfigError(f"no model preset is named {name!r}{hint}: the presets are {', '.join(PRESETS)}")
    config = PRESETS[name]
    return replace(
        config,
        vocab_size=config.vocab_size if vocab_size is None else vocab_size,
        max_sequence_length=config.max_sequence_length if max_sequence_length is None else max_sequence_length,
        **_completed(config, shape or {}),
    )


def _completed(base: ModelConfig, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given numbers, and those that follow from them; a number that is not positive is left to
    ModelConfig."""
    completed = dict(shape)
    sizes = ("hidden_size", "num_heads")
    given_sizes = [name for name in sizes if name in shape]
    if not given_sizes or any(not isinstance(shape[name], int) or shape[name] < 1 for name in given_sizes):
        return completed
    hidden, heads = (shape.get(name, getattr(base, name)) for name in sizes)
    if "hidden_size" in shape:
        width = base.intermediate_size * hidden / base.hidden_size
        completed.setdefault("intermediate_size", math.ceil(width / _MULTIPLE) * _MULTIPLE)
    if "num_heads" in shape:
        kv_heads, remainder = divmod(heads * base.num_kv_heads, base.num_heads)
        completed.setdefault("num_kv_heads", heads if remainder else kv_heads)
    completed.setdefault("head_dim", max(1, hidden // heads))
    return completed
