"""Generates text from a model folder and a prompt, or the next answer in a conversation."""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import final

import torch

from diloco.errors import ConfigError
from diloco.models.registry import open_model
from diloco.models.text.generation import Sampling, stream
from diloco.models.text.prompts import PromptTokenizer, until


@final
class TextGenerator:
    """The model and tokenizer of a folder."""

    def __init__(self, folder: Path, device: str = "auto", threads: int | None = None) -> None:
        """`device`: auto (CUDA if available), cpu or cuda. `threads`: CPU threads of this process."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._tokenizer = PromptTokenizer(folder)  # first: it loads fast, and may be missing
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda, but this machine has no CUDA device that torch can use: use --device cpu")
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self._model = open_model(folder).to("cuda" if on_gpu else "cpu").eval()

    def generate(
        self, prompt: str, *, max_tokens: int, temperature: float, top_k: int | None, seed: int | None
    ) -> Iterator[str]:
        """The continuation of `prompt` in pieces, up to its end or `max_tokens`. The prompt is checked at once."""
        tokens = self._tokenizer.encode(prompt)
        new = self._new(tokens, max_tokens, _sampling(temperature, top_k, seed), self._tokenizer.stop_tokens)
        return self._tokenizer.pieces(tokens, new)

    def answer(
        self,
        conversation: str,
        answer_end: str,
        *,
        max_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int | None,
    ) -> Iterator[str]:
        """The assistant's next message in pieces. `conversation`: written by the model's chat template, up to where
        that message begins; `answer_end`: what the template writes after an answer, empty if that is not known."""
        tokens = self._tokenizer.encode_conversation(conversation)
        ends = self._tokenizer.end_tokens(answer_end)
        new = self._new(tokens, max_tokens, _sampling(temperature, top_k, seed), ends)
        pieces = self._tokenizer.pieces(tokens, new)
        return until(pieces, answer_end) if answer_end else pieces

    def fits(self, conversation: str) -> bool:
        """Whether the model's window has room for a conversation and the beginning of an answer."""
        window = self._model.max_sequence_length
        return window is None or len(self._tokenizer.encode_conversation(conversation)) < window

    def _new(self, tokens: list[int], most: int, sampling: Sampling, ends: Container[int]) -> Iterator[int]:
        window = self._model.max_sequence_length
        if window is not None and len(tokens) > window:
            raise ConfigError(f"the prompt has {len(tokens)} tokens and the model takes {window}: give a shorter one")
        return stream(self._model, tokens, most, sampling, ends)


def _sampling(temperature: float, top_k: int | None, seed: int | None) -> Sampling:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return Sampling(temperature, top_k, generator)
