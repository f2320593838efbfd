"""Writes tokens into the files of a corpus, from one commit to the next.

Tokens added since the last commit are in memory; `commit` appends them to the files and flushes the disk. A preparation
that was killed leaves files at least as long as at its last commit; the next writer truncates them and continues.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from diloco.atomic_files import append_file
from diloco.data.corpus import VALIDATION, mask_bit, shard_name, token_dtype
from diloco.data.preparation.partitions import Partition
from diloco.data.preparation.passages import Passage
from diloco.data.sources.base import Spans
from diloco.data.tokenizer import Tokenizer


@final
class ShardWriter:
    """Encodes passages and appends them to the files of their shards."""

    def __init__(
        self, folder: Path, shards: int, tokenizer: Tokenizer, tokens: Mapping[str, int], *, masked: bool = False
    ) -> None:
        """`tokens`: the tokens of each file at the last commit. Raises ValueError if a file is shorter.

        `masked`: passages say which of their characters are learnt.
        """
        self._folder = folder
        self._tokenizer = tokenizer
        self._masked = masked
        self._dtype = token_dtype(tokenizer.vocab_size, masked=masked)
        self.names = [VALIDATION, *(shard_name(shard) for shard in range(shards))]
        self.tokens = {name: tokens.get(name, 0) for name in self.names}
        self.pending_bytes = 0
        self._pending: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._truncate()

    def _truncate(self) -> None:
        for name, tokens in self.tokens.items():
            with (self._folder / name).open("ab") as file:
                expected = tokens * self._dtype.itemsize
                if file.tell() < expected:
                    raise ValueError(f"{name} has {file.tell()} bytes, less than the {expected} that were written")
                file.truncate(expected)

    @property
    def shard_tokens(self) -> list[int]:
        return [self.tokens[name] for name in self.names[1:]]

    @property
    def validation_tokens(self) -> int:
        return self.tokens[VALIDATION]

    def write(self, passages: Sequence[Passage], partition: Partition) -> list[tuple[Passage, int, int]]:
        """Encode passages for the next commit; returns (passage, shard, number of tokens) of the training passages."""
        pieces = self._encode(passages)
        training = [i for i, passage in enumerate(passages) if not passage.is_validation]
        shards = partition.assign([(passages[i], len(pieces[i])) for i in training])
        names = dict(zip(training, map(shard_name, shards), strict=True))
        for i, piece in enumerate(pieces):
            name = names.get(i, VALIDATION)
            self._pending[name].append(piece)
            self.tokens[name] += len(piece)
            self.pending_bytes += piece.nbytes
        return [(passages[i], shard, len(pieces[i])) for i, shard in zip(training, shards, strict=True)]

    def _encode(self, passages: Sequence[Passage]) -> list[NDArray[Any]]:
        """Return the tokens of each passage, with the end-of-text token that follows it."""
        end = self._tokenizer.end_of_text
        if not self._masked and not any(passage.is_chat for passage in passages):
            encoded = self._tokenizer.encode_batch([passage.text for passage in passages])
            return [np.array([*tokens, end], self._dtype) for tokens in encoded]
        pieces: list[NDArray[Any]] = [np.empty(0)] * len(passages)
        for is_chat in (False, True):
            chosen = [index for index, passage in enumerate(passages) if passage.is_chat == is_chat]
            encoded_chats = self._tokenizer.encode_chats([passages[i].text for i in chosen], special=is_chat)
            for index, (tokens, spans) in zip(chosen, encoded_chats, strict=True):
                pieces[index] = self._masked_piece(passages[index], tokens, spans)
        return pieces

    def _masked_piece(self, passage: Passage, tokens: list[int], spans: Sequence[tuple[int, int]]) -> NDArray[Any]:
        end = self._tokenizer.end_of_text
        learnt = _learnt(spans, passage.answers, len(passage.text))
        if not passage.is_chat or tokens[-1:] != [end]:  # a template may write it
            tokens = [*tokens, end]
            learnt = [*learnt, not passage.is_chat or passage.answers is None]
        piece = np.array(tokens, self._dtype)
        if self._masked:
            piece[~np.array(learnt, bool)] |= mask_bit(self._dtype)
        return piece

    def commit(self) -> None:
        """Append the pending tokens to the files, and flush."""
        for name, pieces in self._pending.items():
            append_file(self._folder / name, np.concatenate(pieces).tobytes())
        self._pending.clear()
        self.pending_bytes = 0


def _learnt(tokens: Sequence[tuple[int, int]], answers: Spans | None, length: int) -> list[bool]:
    """Say which tokens have a character of an answer; `tokens`: their characters in a text of `length` characters."""
    if answers is None:
        return [True] * len(tokens)
    inside = np.zeros(length + 1, np.int64)  # [i]: characters of answers before character i
    for begin, end in answers:
        inside[begin + 1 : end + 1] = 1
    inside = np.cumsum(inside)
    return [bool(inside[end] > inside[begin]) for begin, end in tokens]
