"""Generates text from a model folder and a prompt, or the next answer in a conversation.

A prompt gets the tokenizer's start token, if it has one, but never an end token; a conversation that a chat template
has written has its special tokens as letters already. Text is yielded as soon as it is certain: a token may be part of
a character, its leading space may depend on the token before, and the end of an answer may be several tokens.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch

from diloco.errors import ConfigError
from diloco.models.generation import Sampling, stream
from diloco.models.pretrained import CONFIG_FILE, TOKENIZER_FILE, read_json
from diloco.models.registry import open_model
from diloco.models.tokenizer_files import TOKENIZER_CONFIG_FILE, open_tokenizer

_CONTEXT_TOKENS = 4
"""Tokens that are decoded again with the next one, since decoders treat the start of a text differently."""
_LONGEST_CHARACTER = 4  # bytes, and so tokens, of one character in UTF-8


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
        """Yield the continuation of `prompt` in pieces, up to its end or `max_tokens`. The prompt is checked at
        once."""
        tokens = self._tokenizer.encode(prompt)
        new_tokens = self._generate_tokens(
            tokens, max_tokens, _sampling(temperature, top_k, seed), self._tokenizer.stop_tokens
        )
        return self._tokenizer.pieces(tokens, new_tokens)

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
        """Yield the assistant's next message in pieces. `conversation`: written by the model's chat template, up to
        where that message begins; `answer_end`: what the template writes after an answer, empty if that is not
        known."""
        tokens = self._tokenizer.encode_conversation(conversation)
        ends = self._tokenizer.end_tokens(answer_end)
        new_tokens = self._generate_tokens(tokens, max_tokens, _sampling(temperature, top_k, seed), ends)
        pieces = self._tokenizer.pieces(tokens, new_tokens)
        return until(pieces, answer_end) if answer_end else pieces

    def fits(self, conversation: str) -> bool:
        """Whether the model's window has room for a conversation and the beginning of an answer."""
        window = self._model.max_sequence_length
        return window is None or len(self._tokenizer.encode_conversation(conversation)) < window

    def _generate_tokens(
        self, tokens: list[int], max_tokens: int, sampling: Sampling, ends: Container[int]
    ) -> Iterator[int]:
        window = self._model.max_sequence_length
        if window is not None and len(tokens) > window:
            raise ConfigError(f"the prompt has {len(tokens)} tokens and the model takes {window}: give a shorter one")
        return stream(self._model, tokens, max_tokens, sampling, ends)


def _sampling(temperature: float, top_k: int | None, seed: int | None) -> Sampling:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return Sampling(temperature, top_k, generator)


@final
class PromptTokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / TOKENIZER_FILE).is_file():
            raise ConfigError(f"{folder} has no {TOKENIZER_FILE}: a prompt cannot be read; give a folder that has one")
        self._inner = open_tokenizer(folder / TOKENIZER_FILE)
        self.stop_tokens = _stop_tokens(folder, self._inner)

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt, without an end token."""
        plain: list[int] = self._inner.encode(prompt, add_special_tokens=False).ids
        if not plain:
            raise ConfigError(f"the prompt {prompt!r} has no tokens: give some text")
        tokens: list[int] = list(self._inner.encode(prompt).ids)
        while tokens[-1] in self.stop_tokens and tokens[-1] != plain[-1]:  # the prompt must not end the text
            tokens.pop()
        return tokens

    def encode_conversation(self, text: str) -> list[int]:
        """Encode a conversation as its chat template wrote it: the letters of a special token are that token."""
        tokens: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if not tokens:
            raise ConfigError("the chat template wrote an empty text: give some text, or another template")
        return tokens

    def end_tokens(self, answer_end: str) -> frozenset[int]:
        """Return the stop tokens of a conversation: the model's own, and the token that `answer_end` begins with, if it
        is a special one, which would not show in the text."""
        tokens = self._inner.encode(answer_end, add_special_tokens=False).ids[:1]
        special = self._inner.get_added_tokens_decoder()
        return self.stop_tokens | {token for token in tokens if token in special}

    def pieces(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of `tokens`, which follow `prompt`, in pieces of whole characters."""
        recent = list(prompt[-_CONTEXT_TOKENS:])
        yielded_text = self._decode(recent)
        num_unshown = 0
        for token in tokens:
            recent.append(token)
            text = self._decode(recent)
            num_unshown += 1
            if text.endswith("\N{REPLACEMENT CHARACTER}") and num_unshown < _LONGEST_CHARACTER:
                continue  # perhaps the first bytes of a character
            yield text[len(yielded_text) :]
            recent = recent[-_CONTEXT_TOKENS:]
            num_unshown = 0
            yielded_text = self._decode(recent)
        if num_unshown:
            yield self._decode(recent)[len(yielded_text) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens, skip_special_tokens=True))


def _stop_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Collect every end token that one of the folder's files names."""
    stop_tokens: set[int] = set()
    for name in (CONFIG_FILE, "generation_config.json"):
        if (folder / name).is_file():
            ends = read_json(folder / name).get("eos_token_id")
            stop_tokens.update(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
    if (folder / TOKENIZER_CONFIG_FILE).is_file():
        token = read_json(folder / TOKENIZER_CONFIG_FILE).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(content) if isinstance(content, str) else None
        stop_tokens.update([] if number is None else [number])
    return frozenset(stop_tokens)


def until(pieces: Iterable[str], end: str) -> Iterator[str]:
    """Yield the text before `end`, in pieces; what may be the beginning of `end` is held back until it is certain."""
    held_back = ""
    for piece in pieces:
        held_back += piece
        before, separator, _ = held_back.partition(end)
        if separator:
            yield before
            return
        longest = min(len(end) - 1, len(held_back))
        overlap = next((count for count in range(longest, 0, -1) if end.startswith(held_back[-count:])), 0)
        yield held_back[: len(held_back) - overlap]
        held_back = held_back[len(held_back) - overlap :]
    yield held_back
