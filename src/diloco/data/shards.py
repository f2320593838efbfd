"""prepare(): a source becomes a corpus of token shards, once; afterwards the cached one is opened.

The cache folder's name is a hash of everything that decides its content. It is written under a temporary name
and renamed when complete, so an interrupted preparation is never taken for a corpus, and of two processes
that prepare at once the first to finish wins and both use its result. A cached corpus that does not fit its
own meta.json is rebuilt with a warning. Nothing is ever downloaded.

Paper (DiLoCo, Algorithm 1, "data shards D_1..D_k"): the shards here are i.i.d.; a worker reads one or more of
them.
"""

import hashlib
import heapq
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from diloco.data.config import DataConfig
from diloco.data.corpus import (
    FORMAT_VERSION,
    META,
    TOKENIZER,
    VALIDATION,
    Corpus,
    CorpusMeta,
    shard_name,
    token_dtype,
)
from diloco.data.passages import Passage, Passages
from diloco.data.sources import Source, open_source
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while a corpus is prepared; not called when it is in the cache."""

TOKENIZER_SAMPLE_BYTES = 4 << 20
"""The BPE learns from so much text, spread evenly: twice as much gives < 1 % more bytes per token."""

ENCODE_BATCH_BYTES = 1 << 20
ABANDONED_AFTER_SECONDS = 24 * 3600
PUBLISH_ATTEMPTS = 5


def prepare(config: DataConfig, progress: Progress | None = None) -> Corpus:
    """The corpus that `config` describes: opened if it is in the cache, made otherwise."""
    source = open_source(config.source)
    folder = cache_root(config) / _cache_name(config, source)
    if folder.exists():
        try:
            return Corpus.open(folder)
        except DataError as error:
            logger.warning("the cached corpus is damaged and will be rebuilt: %s", error)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        temporary = _temporary_name(folder)
        temporary.mkdir()
        try:
            _build(config, source, temporary, progress or _no_progress)
            return _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write the prepared corpus to {folder.parent}: {error}; make room there, or choose "
            "another folder with --data.cache-dir"
        ) from error


def cache_root(config: DataConfig) -> Path:
    """Where prepared corpora are kept."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "diloco"


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _cache_name(config: DataConfig, source: Source) -> str:
    """A readable part and a hash of all that decides the content. The sequence length is not part of it."""
    tokenizer: object = config.vocab_size
    if config.tokenizer is not None:
        # The content, not the path: an edited tokenizer must not meet shards made with its former self.
        tokenizer = hashlib.sha256(Tokenizer.read(config.tokenizer).encode()).hexdigest()
    decisive = [FORMAT_VERSION, source.identity(), tokenizer, config.shards, config.validation_fraction]
    digest = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(config.source).stem)[:40].strip("-") or "text"
    return f"{label}-{digest[:16]}"


def _temporary_prefix(folder: Path) -> str:
    return f".{folder.name}.preparing-"


def _temporary_name(folder: Path) -> Path:
    """Beside `folder`, so that the rename is atomic. Not mkdtemp: its folders are closed to others."""
    return folder.parent / f"{_temporary_prefix(folder)}{os.getpid()}-{secrets.token_hex(4)}"


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed preparations of this corpus left behind, but nothing that may still be in use."""
    for leftover in folder.parent.glob(f"{_temporary_prefix(folder)}*"):
        try:
            last_write = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
        except FileNotFoundError:  # its owner has just finished
            continue
        if time.time() - last_write > ABANDONED_AFTER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> Corpus:
    """Give the finished corpus its name, or take the one that another process has finished first."""
    for _ in range(PUBLISH_ATTEMPTS):
        try:
            temporary.rename(folder)  # atomic, and refused where a folder with content is there already
        except OSError:
            if not folder.exists():
                raise
            try:
                return Corpus.open(folder)
            except DataError:
                damaged = _temporary_name(folder)
                with suppress(FileNotFoundError):  # another process was quicker
                    folder.rename(damaged)
                shutil.rmtree(damaged, ignore_errors=True)
        else:
            return Corpus.open(folder)
    raise DataError(f"{folder} is being replaced by another process over and over; delete it and start again")


def _build(config: DataConfig, source: Source, folder: Path, progress: Progress) -> None:
    """Write all files of the corpus into `folder`; meta.json comes last."""
    tokenizer = _obtain_tokenizer(config, source, progress)
    tokenizer_json = tokenizer.to_json().encode()
    (folder / TOKENIZER).write_bytes(tokenizer_json)
    writer = _Writer(folder, config.shards, tokenizer)
    passages = Passages(source, config.validation_fraction)
    done, total = 0, max(1, source.size_bytes)
    for batch in _batches(passages):
        writer.write(batch)
        done += sum(passage.size_bytes for passage in batch)
        progress("tokenising", min(done, total), total)
    progress("tokenising", total, total)
    skipped = _account_for(config, passages)
    meta = CorpusMeta(
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        shard_tokens=tuple(writer.shard_tokens),
        validation_tokens=int(writer.validation_counts.sum()),
        documents=passages.documents,
        characters=passages.characters,
        train_bytes=passages.train_bytes,
        validation_bytes=passages.validation_bytes,
        unigram_perplexity=unigram_perplexity(writer.train_counts, writer.validation_counts),
        tokenizer_bytes=len(tokenizer_json),
        digest=writer.digest(tokenizer_json),
        skipped=skipped,
    )
    (folder / META).write_text(meta.to_json(), encoding="utf-8")


def _account_for(config: DataConfig, passages: Passages) -> dict[str, int]:
    """Refuse a corpus without a training and a validation part; say and return what was left out of it."""
    if not passages.validation_bytes:
        raise DataError(
            f"data.source {config.source!r} has {passages.train_bytes} bytes of text in {passages.documents} "
            "documents: too little for a training and a validation part; give more text"
        )
    skipped = passages.source.skipped
    if skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        logger.warning("data.source %r: files left out: %s", config.source, counts)
    return {**skipped, **passages.left_out}


def _obtain_tokenizer(config: DataConfig, source: Source, progress: Progress) -> Tokenizer:
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer)
    progress("training the tokenizer", 0, 1)
    passages = Passages(source, config.validation_fraction)
    tokenizer = Tokenizer.train(_tokenizer_sample(passages), config.vocab_size)
    progress("training the tokenizer", 1, 1)
    if tokenizer.vocab_size < config.vocab_size:
        logger.warning(
            "data.source %r supports a vocabulary of %d tokens, not the %d asked for (data.vocab_size)",
            config.source, tokenizer.vocab_size, config.vocab_size,
        )  # fmt: skip
    return tokenizer


def _tokenizer_sample(passages: Passages) -> Iterator[str]:
    """Training passages spread evenly over the source, about TOKENIZER_SAMPLE_BYTES of them."""
    share = min(1.0, TOKENIZER_SAMPLE_BYTES / max(1, passages.source.size_bytes))
    taken = 0
    for passage in passages:
        if not passage.is_validation and taken <= share * passages.train_bytes:
            taken += passage.size_bytes
            yield passage.text


def _batches(passages: Passages) -> Iterator[list[Passage]]:
    """Groups of passages that are big enough to keep all cores of the tokenizer busy."""
    batch: list[Passage] = []
    size = 0
    for passage in passages:
        batch.append(passage)
        size += passage.size_bytes
        if size >= ENCODE_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@final
class _Writer:
    """Encodes passages, deals them over the shards and appends them to the files; counts and hashes."""

    def __init__(self, folder: Path, shards: int, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._lightest = [(0, shard) for shard in range(shards)]  # a heap of (tokens, shard)
        names = [VALIDATION, *(shard_name(shard) for shard in range(shards))]
        self._hashes = {name: hashlib.sha256() for name in names}
        self.shard_tokens = [0] * shards
        self.train_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.validation_counts = np.zeros(tokenizer.vocab_size, np.int64)
        for name in names:
            (folder / name).touch()

    def write(self, passages: list[Passage]) -> None:
        pieces: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        encoded = self._tokenizer.encode_batch([passage.text for passage in passages])
        for passage, tokens in zip(passages, encoded, strict=True):
            piece = np.array([*tokens, self._tokenizer.end_of_text], self._dtype)
            counts = self.validation_counts if passage.is_validation else self.train_counts
            counts += np.bincount(piece, minlength=len(counts))
            pieces[VALIDATION if passage.is_validation else self._deal(len(piece))].append(piece)
        for name, parts in pieces.items():
            content = np.concatenate(parts).tobytes()
            self._hashes[name].update(content)
            # Opened for each batch: thousands of shards must not need thousands of open files.
            with (self._folder / name).open("ab") as file:
                file.write(content)

    def _deal(self, tokens: int) -> str:
        """The shard with the fewest tokens so far: shards end up equal to within one passage."""
        load, shard = self._lightest[0]
        heapq.heapreplace(self._lightest, (load + tokens, shard))
        self.shard_tokens[shard] += tokens
        return shard_name(shard)

    def digest(self, tokenizer_json: bytes) -> str:
        whole = hashlib.sha256(tokenizer_json)
        for name, part in self._hashes.items():
            whole.update(f"{name} {part.hexdigest()}\n".encode())
        return whole.hexdigest()


def unigram_perplexity(train_counts: NDArray[np.int64], validation_counts: NDArray[np.int64]) -> float:
    """Perplexity of the validation tokens under the training frequencies with add-one smoothing."""
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    return math.exp(-float(validation_counts @ np.log(probabilities)) / float(validation_counts.sum()))
