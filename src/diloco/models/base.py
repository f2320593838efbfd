"""The interface of a model for training, evaluation and generation.

`NativeModel` (our own transformer) and `HuggingFaceModel` (any causal language model of `transformers`)
implement it; the training loop, the evaluation and the command line use nothing else of them. A model is an
`nn.Module` with fp32 weights, in training mode when it is built. It does not know optimizers, workers or data.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


class Reader(Protocol):
    """The context of a generation: the tokens read so far, with a key/value cache."""

    @property
    def length(self) -> int:
        """The number of tokens read so far."""
        ...

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens to the context; returns the logits (V,) of the next token."""
        ...

    def reset(self) -> None:
        """Empty the context."""
        ...


class LanguageModel(nn.Module, ABC):
    """A causal language model that can be trained, saved and used to generate text."""

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
        """The module that computes everything but the loss; it is compiled as a whole."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Everything but the weights that determines the computation; must be equal on all workers."""

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor:
        """Compute the mean cross entropy in nats, in fp32. tokens, targets: (B, T), int64. `learnt`: only of the
        targets at these indices of the flattened targets, of which there is at least one."""

    @abstractmethod
    def reader(self, length: int) -> Reader:
        """Begin a new context of up to `length` tokens, for generation."""

    @abstractmethod
    def save(self, folder: Path, *, tokenizer_path: Path | None = None, end_of_text: str | None = None) -> None:
        """Write a folder that `transformers` loads, in fp32. `end_of_text`: the tokenizer's end-of-text token."""
