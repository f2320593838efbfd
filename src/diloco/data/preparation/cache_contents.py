"""The prepared corpora in a cache folder: `diloco data list` and `diloco data clear`.

Only folders that this package wrote are listed or deleted, never anything else that lies beside them.
"""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco.data.corpus import FORMAT_VERSION, META
from diloco.data.preparation.corpus_cache import PREPARING, lock_corpus
from diloco.data.preparation.corpus_use import unused
from diloco.errors import DataError

State = Literal["ready", "in use", "being prepared", "interrupted", "outdated"]
_NAME = re.compile(r".+-[0-9a-f]{16}|received-[0-9a-f]{32}")
_PREPARING = re.compile(r"\.(?P<name>.+-[0-9a-f]{16})" + re.escape(PREPARING))


@dataclass(frozen=True)
class CachedCorpus:
    name: str
    folder: Path
    state: State
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
    """The most recently used first."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        preparing = _PREPARING.fullmatch(folder.name)
        if folder.is_dir() and (preparing or _NAME.fullmatch(folder.name)):
            with suppress(FileNotFoundError):  # it has just been finished or deleted
                found.append(_preparing(folder, preparing["name"]) if preparing else _prepared(folder))
    return sorted(found, key=lambda one: (-one.last_used, one.name))


def delete_corpus(corpus: CachedCorpus) -> None:
    """DataError if it is in use by now."""
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


def _preparing(folder: Path, name: str) -> CachedCorpus:
    with lock_corpus(folder.parent / name) as free:
        state: State = "interrupted" if free else "being prepared"
    size, last = _files(folder)
    return CachedCorpus(name, folder, state, size, last)


def _prepared(folder: Path) -> CachedCorpus:
    size, last = _files(folder)
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        numbers = (int(meta["documents"]), sum(meta["shard_tokens"]) + int(meta["validation_tokens"]))
        version = meta["version"]
    except (OSError, ValueError, TypeError, KeyError):
        return CachedCorpus(folder.name, folder, "interrupted", size, last)  # a corpus that was being received
    with unused(folder) as free:
        state: State = "in use" if not free else "ready" if version == FORMAT_VERSION else "outdated"
    return CachedCorpus(folder.name, folder, state, size, (folder / META).stat().st_mtime, *numbers)


def _files(folder: Path) -> tuple[int, float]:
    """The size of all files of a folder, and the time of the last change."""
    statuses = [path.stat() for path in (folder, *folder.iterdir())]
    return sum(status.st_size for status in statuses[1:]), max(status.st_mtime for status in statuses)
