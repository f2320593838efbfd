"""prepare(): builds the corpus of a source once, and opens the cached one afterwards.

The cache folder's name contains a hash of everything that determines its content. The corpus is built in a hidden
folder beside it and renamed when complete, so an interrupted preparation is never mistaken for a corpus; the next one
continues from its last commit (builder.py). A lock lets one process prepare while others wait for its result;
the system releases it when its holder dies. A cached corpus that does not match its meta.json is rebuilt.

Paper (DiLoCo, Algorithm 1, "data shards D_1..D_k"): a worker reads one or more of the shards.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.atomic_files import PARTIAL, move_folder
from diloco.data.config import DataConfig
from diloco.data.corpus import FORMAT_VERSION, Corpus
from diloco.data.preparation.builder import Preparation
from diloco.data.preparation.clusters import LoadFeatures, model_identity
from diloco.data.preparation.corpus_use import hold
from diloco.data.preparation.partitions import Progress
from diloco.data.sources.base import Source
from diloco.data.sources.registry import open_source
from diloco.data.tokenizer_files import find_tokenizer
from diloco.errors import DataError, SourceUnavailable

logger = logging.getLogger(__name__)

ABANDONED_AFTER_SECONDS = 7 * 24 * 3600
LOCK_POLL_SECONDS = 0.2
PREPARING = ".preparing"
"""The end of the name of a hidden folder in which a corpus is built."""


def prepare(config: DataConfig, progress: Progress | None = None, load_features: LoadFeatures | None = None) -> Corpus:
    """The corpus that `config` describes: opened if it is in the cache, built otherwise.

    `progress` is not called if it is in the cache; `load_features` is needed where data.partition = clusters.
    """
    source = open_source(config)
    folder = cache_root(config) / _cache_name(config, source)
    cached = _cached(folder)
    if cached is not None:
        return cached
    report = progress or _no_progress
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with _locked(folder, report):
            return _cached(folder) or _prepared(
                Preparation(config, source, _working(folder), report, load_features), folder
            )
    except OSError as error:
        raise DataError(
            f"cannot write the prepared corpus to {folder.parent}: {error}; make room there, or choose "
            "another folder with --data.cache_dir"
        ) from error


def _prepared(preparation: Preparation, folder: Path) -> Corpus:
    """Run the preparation, or the rest of it, and move the result into the cache."""
    try:
        preparation.run()
    except SourceUnavailable:
        raise  # keep what is there: the same command continues with it
    except DataError:
        shutil.rmtree(preparation.folder, ignore_errors=True)
        raise
    move_folder(preparation.folder, folder)  # replaces a damaged one
    hold(folder)
    return Corpus.open(folder)


def _cached(folder: Path) -> Corpus | None:
    if not folder.exists():
        return None
    hold(folder)
    try:
        return Corpus.open(folder)
    except DataError as error:
        logger.warning("the cached corpus is damaged and will be rebuilt: %s", error)
        return None


def cache_root(config: DataConfig) -> Path:
    """The folder of prepared corpora."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "diloco"


def _no_progress(stage: str, done: int, total: int | None) -> None:
    pass


def _cache_name(config: DataConfig, source: Source) -> str:
    """A readable part, and a hash of everything that determines the content (not the sequence length)."""
    tokenizer: object = config.vocab_size
    if config.tokenizer is not None:
        # The content, not the path: an edited tokenizer must not be used with shards of the earlier one.
        found = find_tokenizer(config.tokenizer)
        tokenizer = [hashlib.sha256(found.content.encode()).hexdigest(), found.end_of_text]
    features = None if config.feature_model is None else model_identity(config.feature_model)
    bounds = [config.max_documents, config.max_bytes]
    determining = [
        FORMAT_VERSION,
        source.identity(),
        bounds,
        tokenizer,
        config.shards,
        config.validation_fraction,
        features,
        config.partition,
        config.on_bad_row,
    ]
    digest = hashlib.sha256(json.dumps(determining).encode()).hexdigest()
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(config.source).stem)[:40].strip("-") or "text"
    return f"{label}-{digest[:16]}"


def _working(folder: Path) -> Path:
    """The folder in which the corpus is built: beside its final place, so that the rename is atomic."""
    return folder.parent / f".{folder.name}{PREPARING}"


def _lock_path(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Exclusive access to this corpus. The system releases the lock when its holder dies."""
    path = _lock_path(folder)
    started = time.monotonic()
    while (lock := _try_lock(path)) is None:
        progress("waiting for another process that prepares the same corpus", int(time.monotonic() - started), None)
        time.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    """An open, locked file; None while another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or removed by its last holder between the two calls
    os.close(lock)
    return None


@contextmanager
def lock_corpus(folder: Path) -> Iterator[bool]:
    """Whether no process prepares this corpus; while the context lasts, none can begin to."""
    try:
        lock = _try_lock(_lock_path(folder))
    except OSError:  # a cache that cannot be written, where nothing is prepared
        yield True
        return
    try:
        yield lock is not None
    finally:
        if lock is not None:
            _lock_path(folder).unlink(missing_ok=True)
            os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Delete interrupted preparations of other corpora that were not continued for a week, and interrupted moves."""
    for leftover in {*folder.parent.glob(f".*{PREPARING}"), *folder.parent.glob(f".*{PARTIAL}")} - {_working(folder)}:
        with suppress(FileNotFoundError):  # it has just been finished
            last_write = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
            if time.time() - last_write > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
