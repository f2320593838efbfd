"""A small corpus of made-up text, for tests and for measuring speed where no text is at hand.

Each token has a few successors, one of them likely, so that a model has something to learn. In a corpus of several
domains the shards have other successors each.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diloco.data.corpus import TOKENIZER, VALIDATION, Corpus, CorpusMeta, shard_name, token_dtype

_SUCCESSORS = np.array([0, 0, 0, 1, 1, 2, 3])


def synthetic_corpus(folder: Path, vocab_size: int, tokens: int, *, shards: int = 1, domains: bool = False) -> Corpus:
    """A corpus of `shards` shards with so many tokens together, and a tenth as much to validate; the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(vocab_size)
    each = tokens // shards
    for shard in range(shards):
        _chain(vocab_size, each, shard, shard if domains else 0).astype(dtype).tofile(folder / shard_name(shard))
    held_out = tokens // 10
    pieces = [_chain(vocab_size, held_out // shards, 1000 + shard, shard if domains else 0) for shard in range(shards)]
    np.concatenate(pieces).astype(dtype).tofile(folder / VALIDATION)
    (folder / TOKENIZER).write_text("{}")
    meta = CorpusMeta(
        vocab_size=vocab_size,
        end_of_text=0,
        shard_tokens=(each,) * shards,
        validation_tokens=held_out // shards * shards,
        documents=shards,
        characters=tokens,
        train_bytes=each * shards,
        validation_bytes=held_out // shards * shards,
        unigram_perplexity=float(vocab_size),
        tokenizer_bytes=2,
        digest=f"synthetic {vocab_size} {tokens} {shards} {domains}",
        skipped={},
        partition="labels" if domains else "iid",
    )
    (folder / "meta.json").write_text(meta.to_json())
    return Corpus.open(folder)


def _chain(vocab_size: int, count: int, seed: int, domain: int) -> NDArray[np.int64]:
    """Token t is followed by one of table[t], the first of them most often."""
    table = np.random.default_rng([7, domain]).integers(0, vocab_size, (vocab_size, 4))
    generator = np.random.default_rng([8, seed])
    choices = _SUCCESSORS[generator.integers(0, len(_SUCCESSORS), count)]
    lanes = max(1, min(256, count // 256))  # chains side by side, since each is sequential
    length = -(-count // lanes)
    padded = np.resize(choices, (lanes, length))
    state = generator.integers(0, vocab_size, lanes)
    chains = np.empty((lanes, length), np.int64)
    for step in range(length):
        state = chains[:, step] = table[state, padded[:, step]]
    return chains.reshape(-1)[:count]
