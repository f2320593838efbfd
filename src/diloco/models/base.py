"""What the rest of the program needs of a model, whoever wrote it.

`NativeModel` (our own transformer) and `HuggingFaceModel` (any causal language model of `transformers`) are such
models; the training loop, the evaluation and the command line know nothing else of either. A model is an `nn.Module`
with fp32 weights, in training mode when it is built. It knows nothing of optimizers, workers or data.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


class Reader(Protocol):
    """A text that a model has read so far, kept so that the next tokens cost only themselves (a key/value cache)."""

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        ...

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read on; returns the logits (V,) of what follows the last token."""
        ...

    def reset(self) -> None:
        """Start again from an empty text."""
        ...


class LanguageModel(nn.Module, ABC):
    """A causal language model that can be trained, saved and made to write."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens 0 to vocab_size - 1 have a vector."""

    @property
    @abstractmethod
    def max_sequence_length(self) -> int | None:
        """The longest sequence it takes; None: no bound is known."""

    @property
    @abstractmethod
    def body(self) -> nn.Module:
        """What computes all but the loss: the part that is compiled as one."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Everything but the weights that decides what it computes. Workers that train together have the same."""

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats, in fp32. tokens, targets: (B, T), int64."""

    @abstractmethod
    def reader(self, length: int) -> Reader:
        """For generation: reads texts of up to `length` tokens at a time."""

    @abstractmethod
    def save(self, folder: Path, *, tokenizer_path: Path | None = None, end_of_text: str | None = None) -> None:
        """Write a folder that `transformers` loads, fp32. `end_of_text`: the tokenizer's token that ends a text."""
