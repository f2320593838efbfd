"""A corpus received file by file from other workers, each file checked against the corpus digest.

The digest (corpus.py) covers the tokenizer and the SHA-256 of the other files. Metadata that does not match the digest
is refused, and so is a file that does not match the metadata. Files are data: nothing is executed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from diloco.atomic_files import digest_file
from diloco.data.config import LARGEST_SHARD_COUNT, LARGEST_VOCAB_SIZE, DataConfig
from diloco.data.corpus import (
    FORMAT_VERSION,
    META,
    TOKENIZER,
    VALIDATION,
    Corpus,
    CorpusMeta,
    corpus_digest,
    shard_name,
)
from diloco.data.preparation.corpus_cache import cache_root, hold
from diloco.data.preparation.partitions import ReportProgress
from diloco.data.tokenizer import TOKENIZER_CONFIG_FILES, Tokenizer
from diloco.errors import DataError

METADATA_FILES = (META, TOKENIZER, TOKENIZER_CONFIG_FILES[0])
"""Received first: the other files are checked against them."""

Fetch = Callable[[str, Path], None]
"""Fetches the named file to a path; raises DiLoCoError or OSError, and leaves no partial file."""


class FetchVerified(Protocol):
    """Fetches a file of at most `most_bytes` with SHA-256 `digest`, from another worker if one sends other bytes."""

    def __call__(self, name: str, path: Path, most_bytes: int, digest: str) -> None: ...


def corpus_files(corpus: Corpus) -> dict[str, Path]:
    """List the files of a corpus that a worker serves to others, including shards that it has not received yet."""
    names = [*METADATA_FILES, VALIDATION, *(shard_name(shard) for shard in range(corpus.shards))]
    return {name: corpus.folder / name for name in names}


def received_corpus_folder(config: DataConfig, digest: str) -> Path:
    """Return the cache folder of a received corpus with that digest."""
    return cache_root(config) / f"received-{digest[:32]}"


def find_corpus(config: DataConfig, digest: str) -> Corpus | None:
    """Find the corpus with that digest on this machine, prepared or (perhaps partly) received; None if there is
    none."""
    folder = received_corpus_folder(config, digest)
    for path in sorted(folder.parent.glob(f"[!.]*/{META}"), key=lambda path: path.parent == folder):
        try:
            corpus = Corpus.open(path.parent, allow_missing_shards=path.parent == folder)
        except DataError:
            continue
        if corpus.digest == digest and hold(path.parent):
            return corpus
    return None


def receive_metadata(folder: Path, digest: str, fetch: Fetch) -> CorpusMeta:
    """Receive meta.json and the tokenizer of the corpus with that digest; DataError if they do not match it."""
    folder.mkdir(parents=True, exist_ok=True)
    _forget_other_version(folder / META)
    for name in METADATA_FILES:
        if not (folder / name).is_file():
            fetch(name, folder / name)
    try:
        meta = CorpusMeta.from_json((folder / META).read_text(encoding="utf-8"))
        _check(meta, (folder / TOKENIZER).read_bytes(), digest)
        _check_tokenizer(folder, meta)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        for name in METADATA_FILES:
            (folder / name).unlink(missing_ok=True)
        reason = str(error) if isinstance(error, DataError) else repr(error)
        raise DataError(f"the received metadata does not match the corpus {digest[:16]}: {reason}") from error
    return meta


def receive_files(
    folder: Path, meta: CorpusMeta, shards: Iterable[int], fetch: FetchVerified, progress: ReportProgress
) -> Corpus:
    """Receive the validation text and these shards, except files already here; every file is checked."""
    names = [VALIDATION, *map(shard_name, shards)]
    sizes = Corpus(folder, meta).file_sizes()
    for number, name in enumerate(names):
        progress("receiving the data", number, len(names))
        if not (folder / name).is_file():
            fetch(name, folder / name, sizes[name], meta.files[name])
            check_file(meta, folder / name)
    progress("receiving the data", len(names), len(names))
    hold(folder)
    return Corpus.open(folder, allow_missing_shards=True)


def bytes_to_receive(folder: Path, meta: CorpusMeta, shards: Sequence[int]) -> int:
    """Count the bytes of the validation text and these shards that are not here yet."""
    sizes = Corpus(folder, meta).file_sizes()
    names = [VALIDATION, *map(shard_name, shards)]
    return sum(sizes[name] for name in names if not (folder / name).is_file())


def check_file(meta: CorpusMeta, path: Path) -> None:
    """Remove a file whose SHA-256 differs from the corpus metadata, and raise DataError."""
    if digest_file(path).sha256 != meta.files.get(path.name):
        path.unlink()
        raise DataError(f"the received {path.name} does not match the corpus {meta.digest[:16]}")


def _forget_other_version(path: Path) -> None:
    """Remove the metadata that another version of this package has received; the shards stay usable."""
    try:
        version = json.loads(path.read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if version != FORMAT_VERSION:
        path.unlink()


def _check(meta: CorpusMeta, tokenizer: bytes, digest: str) -> None:
    expected = [VALIDATION, *(shard_name(shard) for shard in range(len(meta.shard_tokens)))]
    if list(meta.files) != expected or not 1 <= len(meta.shard_tokens) <= LARGEST_SHARD_COUNT:
        raise DataError(f"it names {len(meta.files)} files for {len(meta.shard_tokens)} shards")
    computed = corpus_digest(tokenizer, meta.files, masked=bool(meta.masked), chat_template=meta.chat_template)
    if meta.digest != digest or computed != digest:
        raise DataError("the digest of its tokenizer and files differs")
    counts = (*meta.shard_tokens, meta.validation_tokens)
    if not all(isinstance(tokens, int) and 0 <= tokens < 1 << 42 for tokens in counts):
        raise DataError("its token counts are out of range")
    if not (isinstance(meta.vocab_size, int) and 0 <= meta.end_of_text < meta.vocab_size <= LARGEST_VOCAB_SIZE):
        raise DataError(f"its vocabulary of {meta.vocab_size} tokens is out of range")


def _check_tokenizer(folder: Path, meta: CorpusMeta) -> None:
    """Check tokenizer_config.json, which the digest does not cover: it may name the end-of-text token only."""
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if (tokenizer.end_of_text, tokenizer.vocab_size) != (meta.end_of_text, meta.vocab_size):
        raise DataError(f"its tokenizer has {tokenizer.vocab_size} tokens, its description {meta.vocab_size}")
    tokenizer.check_target(folder / TOKENIZER)
