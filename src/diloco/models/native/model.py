"""Our transformer as a LanguageModel: random weights in a preset's shape, or those of a Llama-family folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from diloco.models.base import LanguageModel, Reader
from diloco.models.native.config import ModelConfig
from diloco.models.native.saving import load_model, save_model
from diloco.models.native.transformer import KeyValueCache, Transformer


@final
class NativeModel(Transformer, LanguageModel):
    """`Transformer` with the interface of `LanguageModel`; the weights keep their names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.origin: Path | None = None  # the folder of its first weights

    @classmethod
    def load(cls, folder: Path) -> "NativeModel":
        """Load the model of a Llama-family folder."""
        model = load_model(folder, cls)
        model.origin = folder
        return model

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length

    @property
    def body(self) -> nn.Module:
        return self.model

    @property
    def description(self) -> str:
        return repr(self.config)

    def reader(self, length: int) -> Reader:
        return _NativeReader(self, length)

    def save(self, folder: Path, *, tokenizer_path: Path | None = None, end_of_text: str | None = None) -> None:
        save_model(self, folder, tokenizer_path=tokenizer_path, end_of_text=end_of_text, origin=self.origin)


@final
class _NativeReader:
    """A context of at most `length` tokens, in a cache that is allocated once."""

    def __init__(self, model: Transformer, length: int) -> None:
        self._model = model
        weight = model.model.embed_tokens.weight
        self._device = weight.device
        shape = replace(model.config, max_sequence_length=length)
        self._cache = KeyValueCache(shape, batch_size=1, device=weight.device, dtype=weight.dtype)

    @property
    def length(self) -> int:
        return self._cache.length

    def read(self, tokens: Sequence[int]) -> Tensor:
        logits: Tensor = self._model(torch.tensor([list(tokens)], device=self._device), self._cache)
        return logits[0, -1]

    def reset(self) -> None:
        self._cache.length = 0
