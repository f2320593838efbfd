"""The cache of prepared corpora: prepare() builds the corpus of a source once, and opens the cached one afterwards.

The cache folder's name contains a hash of everything that determines its content. The corpus is built in a hidden
folder beside it and renamed when complete, so an interrupted preparation is never mistaken for a corpus; the next one
continues from its last commit (builder.py). A lock lets one process prepare while others wait for its result. A cached
corpus that does not match its meta.json is rebuilt.

A process that uses a corpus holds a shared lock on its meta.json until it ends (`hold`). `diloco data clear` takes the
exclusive lock, so it deletes nothing that a run reads. The system releases the locks of a process that dies.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco.atomic_files import PARTIAL, move_folder
from diloco.data.config import DataConfig
from diloco.data.corpus import FORMAT_VERSION, META, Corpus
from diloco.data.preparation.builder import Preparation
from diloco.data.preparation.partitions import LoadFeatures, ReportProgress, model_identity
from diloco.data.sources.base import Source
from diloco.data.sources.registry import open_source
from diloco.data.tokenizer import find_tokenizer
from diloco.errors import DataError, SourceUnavailable

logger = logging.getLogger(__name__)

ABANDONED_AFTER_SECONDS = 7 * 24 * 3600
LOCK_POLL_SECONDS = 0.2
PREPARING = ".preparing"
"""The end of the name of a hidden folder in which a corpus is built."""
_USE_WAIT_SECONDS = 5.0
_USE_POLL_SECONDS = 0.05
_CORPUS_NAME = re.compile(r".+-[0-9a-f]{16}|received-[0-9a-f]{32}")
_PREPARING_NAME = re.compile(r"\.(?P<name>.+-[0-9a-f]{16})" + re.escape(PREPARING))
_held: dict[str, int] = {}
"""Files that this process keeps open and locked, by path."""

CorpusState = Literal["ready", "in use", "being prepared", "interrupted", "outdated"]


def prepare(
    config: DataConfig, progress: ReportProgress | None = None, load_features: LoadFeatures | None = None
) -> Corpus:
    """Open the corpus that `config` describes, or build it if it is not in the cache.

    `progress` is not called if it is in the cache; `load_features` is needed where data.partition = clusters.
    """
    source = open_source(config)
    folder = cache_root(config) / _cache_name(config, source)
    cached = _open_cached(folder)
    if cached is not None:
        return cached
    report = progress or _no_progress
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with _preparation_lock(folder, report):
            return _open_cached(folder) or _run_preparation(
                Preparation(config, source, _working_folder(folder), report, load_features), folder
            )
    except OSError as error:
        raise DataError(
            f"cannot write the prepared corpus to {folder.parent}: {error}; make room there, or choose "
            "another folder with --data.cache_dir"
        ) from error


def _run_preparation(preparation: Preparation, folder: Path) -> Corpus:
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


def _open_cached(folder: Path) -> Corpus | None:
    """Open a prepared corpus; None if it is not there, or damaged."""
    if not folder.exists():
        return None
    hold(folder)
    try:
        return Corpus.open(folder)
    except DataError as error:
        logger.warning("the cached corpus is damaged and will be rebuilt: %s", error)
        return None


def cache_root(config: DataConfig) -> Path:
    """Return the folder of prepared corpora."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    xdg_cache_home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(xdg_cache_home) if Path(xdg_cache_home).is_absolute() else Path.home() / ".cache"
    return base / "diloco"


def _no_progress(stage: str, done: int, total: int | None) -> None:
    pass


def _cache_name(config: DataConfig, source: Source) -> str:
    """Return a readable name with a hash of everything that determines the content (not the
    sequence length)."""
    tokenizer: object = config.vocab_size
    if config.tokenizer is not None:
        # The content, not the path: an edited tokenizer must not be used with shards of the earlier one.
        file = find_tokenizer(config.tokenizer)
        tokenizer = [hashlib.sha256(file.content.encode()).hexdigest(), file.end_of_text]
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


def _working_folder(folder: Path) -> Path:
    """Return the folder in which the corpus is built: beside its final place, so that the rename is atomic."""
    return folder.parent / f".{folder.name}{PREPARING}"


def _lock_path(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


@contextmanager
def _preparation_lock(folder: Path, progress: ReportProgress) -> Iterator[None]:
    """Wait for a process that prepares this corpus, and keep others from it. The system releases the lock of a
    holder that dies."""
    path = _lock_path(folder)
    started = time.monotonic()
    while (lock := _try_preparation_lock(path)) is None:
        progress("waiting for another process that prepares the same corpus", int(time.monotonic() - started), None)
        time.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _try_preparation_lock(path: Path) -> int | None:
    """Return an open, locked file; None while another process holds the lock."""
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
    """Yield whether no process prepares this corpus; while the context lasts, none can begin to."""
    try:
        lock = _try_preparation_lock(_lock_path(folder))
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
    for leftover in {*folder.parent.glob(f".*{PREPARING}"), *folder.parent.glob(f".*{PARTIAL}")} - {
        _working_folder(folder)
    }:
        with suppress(FileNotFoundError):  # it has just been finished
            last_write = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
            if time.time() - last_write > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


# The corpora in use


def hold(folder: Path) -> bool:
    """Keep the corpus from being cleared until this process ends, and note when it was last used.

    Returns False if it is not there, or is being deleted.
    """
    path = folder / META
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    deadline = time.monotonic() + _USE_WAIT_SECONDS
    while not _lock_use(file, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            os.close(file)
            return False
        time.sleep(_USE_POLL_SECONDS)
    if not _is_there(file, path):  # deleted meanwhile
        os.close(file)
        return False
    with suppress(OSError):  # the cache may be read-only
        os.utime(path)
    earlier = _held.pop(str(path), None)
    _held[str(path)] = file
    if earlier is not None:
        os.close(earlier)
    return True


@contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Yield whether no process holds the corpus; while the context lasts, none can begin to."""
    try:
        file = os.open(folder / META, os.O_RDONLY)
    except OSError:
        yield True
        return
    try:
        yield _lock_use(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


def _lock_use(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_there(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except OSError:
        return False


# The corpora in the cache


@dataclass(frozen=True)
class CachedCorpus:
    """What `diloco data list` tells of a prepared corpus, or of one that is being prepared."""

    name: str
    folder: Path
    state: CorpusState
    """interrupted: the same command continues it; outdated: of an earlier version, which this one does not use."""
    size_bytes: int
    last_used: float
    """Seconds since 1970."""
    documents: int | None = None
    tokens: int | None = None

    @property
    def is_free(self) -> bool:
        return self.state not in ("in use", "being prepared")


def list_corpora(root: Path) -> list[CachedCorpus]:
    """List the corpora of a cache folder, the most recently used first. Other files beside them are left alone."""
    corpora = []
    for folder in root.iterdir() if root.is_dir() else ():
        preparing = _PREPARING_NAME.fullmatch(folder.name)
        if folder.is_dir() and (preparing or _CORPUS_NAME.fullmatch(folder.name)):
            with suppress(FileNotFoundError):  # it has just been finished or deleted
                name = preparing["name"] if preparing else None
                corpora.append(_describe_corpus(folder) if name is None else _describe_preparation(folder, name))
    return sorted(corpora, key=lambda corpus: (-corpus.last_used, corpus.name))


def delete_corpus(corpus: CachedCorpus) -> None:
    """Delete a corpus; DataError if it is in use by now."""
    try:
        if corpus.folder.name.endswith(PREPARING):
            with lock_corpus(corpus.folder.parent / corpus.name) as free:
                _delete(corpus, free)
        else:
            with unused(corpus.folder) as free:
                _delete(corpus, free)
    except OSError as error:
        raise DataError(f"{corpus.folder} cannot be deleted: {error}; delete it yourself") from error


def _delete(corpus: CachedCorpus, free: bool) -> None:
    if not free:
        raise DataError(f"{corpus.name} is in use: stop the runs that read it first (its folder is {corpus.folder})")
    shutil.rmtree(corpus.folder)


def _describe_preparation(folder: Path, name: str) -> CachedCorpus:
    with lock_corpus(folder.parent / name) as free:
        state: CorpusState = "interrupted" if free else "being prepared"
    size, last_change = _size_and_last_change(folder)
    return CachedCorpus(name, folder, state, size, last_change)


def _describe_corpus(folder: Path) -> CachedCorpus:
    size, last_change = _size_and_last_change(folder)
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        numbers = (int(meta["documents"]), sum(meta["shard_tokens"]) + int(meta["validation_tokens"]))
        version = meta["version"]
    except (OSError, ValueError, TypeError, KeyError):
        return CachedCorpus(folder.name, folder, "interrupted", size, last_change)  # a corpus that was being received
    with unused(folder) as free:
        state: CorpusState = "in use" if not free else "ready" if version == FORMAT_VERSION else "outdated"
    return CachedCorpus(folder.name, folder, state, size, (folder / META).stat().st_mtime, *numbers)


def _size_and_last_change(folder: Path) -> tuple[int, float]:
    """Return the size of all files of a folder, and the time of the last change."""
    statuses = [path.stat() for path in (folder, *folder.iterdir())]
    return sum(status.st_size for status in statuses[1:]), max(status.st_mtime for status in statuses)
