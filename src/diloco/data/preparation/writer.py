"""Writes tokens into the files of a corpus, from one commit to the next.

Tokens added since the last commit are in memory; `commit` appends them to the files and flushes the disk. A preparation
that was killed leaves files at least as long as at its last commit; the next writer truncates them and continues. A
`Partition` assigns passages to shards; one of them needs a model.
"""

import heapq
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from diloco.atomic_files import append_file
from diloco.data.corpus import VALIDATION, shard_name, token_dtype
from diloco.data.preparation.passages import Passage
from diloco.data.tokenizer import Tokenizer


class Partition(ABC):
    """Assigns training passages to shards."""

    @abstractmethod
    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        """The shard of each (passage, number of tokens)."""


@final
class IidPartition(Partition):
    """Always the shard with the fewest tokens so far, so the sizes differ by at most a passage."""

    def __init__(self, loads: Sequence[int]) -> None:
        self._lightest = [(load, shard) for shard, load in enumerate(loads)]
        heapq.heapify(self._lightest)

    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        shards = []
        for _, length in passages:
            load, shard = self._lightest[0]
            heapq.heapreplace(self._lightest, (load + length, shard))
            shards.append(shard)
        return shards


@final
class ShardWriter:
    """Encodes passages and appends them to the files of their shards."""

    def __init__(self, folder: Path, shards: int, tokenizer: Tokenizer, tokens: Mapping[str, int]) -> None:
        """`tokens`: the tokens of each file at the last commit. Raises ValueError if a file is shorter."""
        self._folder, self._tokenizer = folder, tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
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
        """Encode for the next commit; returns (passage, shard, number of tokens) of the training passages."""
        encoded = self._tokenizer.encode_batch([passage.text for passage in passages])
        pieces = [np.array([*tokens, self._tokenizer.end_of_text], self._dtype) for tokens in encoded]
        training = [i for i, passage in enumerate(passages) if not passage.is_validation]
        shards = partition.assign([(passages[i], len(pieces[i])) for i in training])
        names = dict(zip(training, map(shard_name, shards), strict=True))
        for i, piece in enumerate(pieces):
            name = names.get(i, VALIDATION)
            self._pending[name].append(piece)
            self.tokens[name] += len(piece)
            self.pending_bytes += piece.nbytes
        return [(passages[i], shard, len(pieces[i])) for i, shard in zip(training, shards, strict=True)]

    def commit(self) -> None:
        """Append the pending tokens to the files, and flush."""
        for name, pieces in self._pending.items():
            append_file(self._folder / name, np.concatenate(pieces).tobytes())
        self._pending.clear()
        self.pending_bytes = 0
