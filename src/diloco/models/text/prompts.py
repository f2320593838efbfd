"""A model folder's tokenizer: encodes prompts, and decodes generated text token by token.

A prompt gets the tokenizer's start token, if it has one, but never an end token; a conversation that a chat template
has written has its special tokens as letters already. Text is yielded as soon as it is certain: a token may be part of
a character, its leading space may depend on the token before, and the end of an answer may be several tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from diloco.errors import ConfigError
from diloco.models.pretrained import CONFIG_FILE, TOKENIZER_FILE, read_json
from diloco.models.tokenizer_files import TOKENIZER_CONFIG_FILE, open_tokenizer

_CONTEXT = 4  # tokens that are decoded again with the next one, since decoders treat the start of a text differently
_LONGEST_CHARACTER = 4  # bytes, and so tokens, of one character in UTF-8


@final
class PromptTokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / TOKENIZER_FILE).is_file():
            raise ConfigError(f"{folder} has no {TOKENIZER_FILE}: a prompt cannot be read; give a folder that has one")
        self._inner = open_tokenizer(folder / TOKENIZER_FILE)
        self.stop_tokens = _stop_tokens(folder, self._inner)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, without an end token."""
        plain: list[int] = self._inner.encode(prompt, add_special_tokens=False).ids
        if not plain:
            raise ConfigError(f"the prompt {prompt!r} has no tokens: give some text")
        tokens: list[int] = list(self._inner.encode(prompt).ids)
        while tokens[-1] in self.stop_tokens and tokens[-1] != plain[-1]:  # the prompt must not end the text
            tokens.pop()
        return tokens

    def encode_conversation(self, text: str) -> list[int]:
        """The tokens of a conversation as its chat template wrote it: the letters of a special token are that token."""
        tokens: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if not tokens:
            raise ConfigError("the chat template wrote an empty text: give some text, or another template")
        return tokens

    def end_tokens(self, answer_end: str) -> frozenset[int]:
        """The stop tokens of a conversation: the model's own, and the token that `answer_end` begins with, if it is a
        special one, which would not show in the text."""
        tokens = self._inner.encode(answer_end, add_special_tokens=False).ids[:1]
        special = self._inner.get_added_tokens_decoder()
        return self.stop_tokens | {token for token in tokens if token in special}

    def pieces(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """The text of `tokens`, which follow `prompt`, in pieces of whole characters."""
        recent = list(prompt[-_CONTEXT:])
        shown, waiting = self._decode(recent), 0
        for token in tokens:
            recent.append(token)
            text, waiting = self._decode(recent), waiting + 1
            if text.endswith("\N{REPLACEMENT CHARACTER}") and waiting < _LONGEST_CHARACTER:
                continue  # perhaps the first bytes of a character
            yield text[len(shown) :]
            recent, waiting = recent[-_CONTEXT:], 0
            shown = self._decode(recent)
        if waiting:
            yield self._decode(recent)[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens, skip_special_tokens=True))


def until(pieces: Iterable[str], end: str) -> Iterator[str]:
    """The text before `end`, in pieces; what may be the beginning of `end` is held back until it is certain."""
    held = ""
    for piece in pieces:
        held += piece
        before, found, _ = held.partition(end)
        if found:
            yield before
            return
        most = min(len(end) - 1, len(held))
        kept = next((count for count in range(most, 0, -1) if end.startswith(held[-count:])), 0)
        yield held[: len(held) - kept]
        held = held[len(held) - kept :]
    yield held


def _stop_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every end token that one of the folder's files names."""
    found: set[int] = set()
    for name in (CONFIG_FILE, "generation_config.json"):
        if (folder / name).is_file():
            ends = read_json(folder / name).get("eos_token_id")
            found.update(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
    if (folder / TOKENIZER_CONFIG_FILE).is_file():
        token = read_json(folder / TOKENIZER_CONFIG_FILE).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(content) if isinstance(content, str) else None
        found.update([] if number is None else [number])
    return frozenset(found)
