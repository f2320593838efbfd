"""Generates text from a model folder and a prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch

from diloco.errors import ConfigError
from diloco.models.registry import open_model
from diloco.models.text.generation import Sampling, stream
from diloco.models.text.prompts import PromptTokenizer


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
        window = self._model.max_sequence_length
        if window is not None and len(tokens) > window:
            raise ConfigError(f"the prompt has {len(tokens)} tokens and the model takes {window}: give a shorter one")
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        sampling = Sampling(temperature, top_k, generator)
        new = stream(self._model, tokens, max_tokens, sampling, self._tokenizer.stop_tokens)
        return self._tokenizer.pieces(tokens, new)
