"""Text on this machine: the Python library, or files and folders in the formats of formats.py.

A file that the system cannot read is always an error, because a worker that silently lacks part of the data would
differ from the others. A file or row with unusable content is one too, unless data.on_bad_row = skip.
"""

import ast
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import ClassVar, final

from diloco.data.config import DataConfig
from diloco.data.sources.base import Document, Source
from diloco.data.sources.decoding import fits, open_decompressed
from diloco.data.sources.formats import (
    DocumentFile,
    Parquet,
    TextFile,
    format_of,
    is_compressed,
    known_suffixes,
    stem_of,
)
from diloco.data.sources.rows import Rows, TextRows, rows_of
from diloco.errors import DataError

_READ_BYTES = 1 << 20
MOST_LABELLED_FILES = 256
"""In a folder with more files than this, file names are not used as labels."""


@final
class StandardLibrary(Source):
    """The running interpreter's library and the prose of `pydoc_data`: text that is on every machine.

    Without the tests (most of the library, with deliberately broken files, and absent on Debian) and without the
    character tables of `encodings`.
    """

    EXCLUDED_FOLDERS: ClassVar[frozenset[str]] = frozenset(
        {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
    )
    TOPICS = "pydoc_data/topics.py"

    def __init__(self, root: Path | None = None) -> None:
        super().__init__()
        self.root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
        self._files = {
            name: status for name, status in _walk(self.root, self.EXCLUDED_FOLDERS).items() if name.endswith(".py")
        }
        self._done_bytes = 0
        if not self._files:
            raise DataError(
                f"data.source 'stdlib': there is no Python source under {self.root}; this interpreter keeps "
                "its library elsewhere (frozen or zipped?), so give a text file or folder with --data.source"
            )

    @classmethod
    def open(cls, config: DataConfig) -> "StandardLibrary | None":
        if config.source != "stdlib":
            return None
        if config.has_row_options:
            raise DataError(
                "data.source 'stdlib' has no fields: leave out data.text_field, data.label_field, data.format"
            )
        if config.encoding is not None:
            raise DataError(f"data.source 'stdlib' is UTF-8: leave out data.encoding ({config.encoding!r})")
        return cls()

    def identity(self) -> dict[str, object]:
        # Sizes without times: reinstalling the same interpreter gives the same text.
        version = f"{platform.python_implementation()} {platform.python_version()}"
        files = [(name, status.st_size) for name, status in self._files.items()]
        return {"kind": "stdlib", "version": version, "root": str(self.root), "files": files}

    @property
    def size_bytes(self) -> int:
        return sum(status.st_size for status in self._files.values())

    def progress(self) -> tuple[int, int | None]:
        return self._done_bytes, self.size_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        self.skipped = Counter()
        self._done_bytes = 0
        return islice(self._all_documents(), start, None)  # a few megabytes: reading them again costs nothing

    def _all_documents(self) -> Iterator[Document]:
        for name, status in self._files.items():
            self._done_bytes += status.st_size
            (document,) = TextFile(self.root / name, TextRows(skip=True)).documents(0)
            if document.problem is not None:
                self.skipped["not UTF-8 text"] += 1
            else:
                yield from self._topics(document.text) if name == self.TOPICS else [document]

    @staticmethod
    def _topics(text: str) -> Iterator[Document]:
        """Yield the help texts themselves; as Python source they would be escaped strings."""
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                topics: dict[str, str] = ast.literal_eval(statement.value)
                yield from (Document(topics[name]) for name in sorted(topics))


@final
class LocalFiles(Source):
    """A file in one of the formats of formats.py, or all such files of a folder and its subfolders but hidden ones.

    A document's label is its field `data.label_field`, or the name of its file if there are several files.
    """

    def __init__(self, path: Path, rows: Rows | None = None, encoding: str | None = None) -> None:
        super().__init__()
        self.path = path
        self.encoding = encoding
        self.rows = rows or TextRows()
        self.chat_template = self.rows.chat_template
        self._is_folder = path.is_dir()
        names = _walk(path, frozenset({"__pycache__"})) if self._is_folder else {"": path.stat()}
        files = {path / name if name else path: status for name, status in names.items()}
        self._files = {file: status for file, status in files.items() if format_of(file) is not None}
        self._other_suffixes = len(files) - len(self._files)
        self._done_bytes = 0
        self._open_file: DocumentFile | None = None
        self._check()

    def _check(self) -> None:
        if not self._files and self._is_folder:
            problem = "the folder is empty (hidden files do not count)"
            if self._other_suffixes:
                problem = f"none of the {self._other_suffixes} files in this folder is one that can be read"
            raise DataError(f"data.source {str(self.path)!r}: {problem}; known suffixes are: {known_suffixes()}")
        if not self._files:
            raise DataError(
                f"data.source {str(self.path)!r}: {self.path.suffix!r} is not the suffix of a file that can be read; "
                f"convert or rename it to one of: {known_suffixes()}"
            )

    def _check_fields(self) -> None:
        """Refuse options about fields where no document has any."""
        formats = {format_of(path) for path in self._files}
        if not any(kind is not None and kind.has_fields for kind in formats):
            raise DataError(
                f"data.source {str(self.path)!r} has plain text only, whose documents have no fields: leave out "
                "data.text_field, data.label_field and data.format, which are for .jsonl, .json, .csv, .tsv and "
                ".parquet files"
            )

    @classmethod
    def open(cls, config: DataConfig) -> "LocalFiles":
        path = Path(config.source).expanduser()
        try:
            usable = path.is_file() or path.is_dir()
        except OSError as error:
            raise DataError(f"data.source {config.source!r} cannot be read: {error}; make it readable") from error
        if not usable:
            raise DataError(
                f"data.source {config.source!r}: there is no such file or folder (looked for {path.absolute()}); give "
                "the path of a file or folder, 'stdlib' for the Python library, or hf:NAME for a Hugging Face dataset"
            )
        source = cls(path.resolve(), rows_of(config), config.encoding)
        if config.encoding is not None and all(format_of(file) is Parquet for file in source._files):
            raise DataError(f"data.encoding is {config.encoding!r}, but Parquet files are always UTF-8: leave it out")
        if config.has_row_options:
            source._check_fields()
        return source

    def identity(self) -> dict[str, object]:
        files = [(str(path), status.st_size, status.st_mtime_ns) for path, status in self._files.items()]
        return {"kind": "local", "files": files, "rows": self.rows.identity(), "encoding": self.encoding}

    @cached_property
    def size_bytes(self) -> int:
        """The size of the files without their compression: tokenizer and passages do not depend on how they are packed.

        Compressed files are read once for it.
        """
        return sum(_unpacked_bytes(path) if is_compressed(path) else each.st_size for path, each in self._files.items())

    def progress(self) -> tuple[int, int | None]:
        position = 0 if self._open_file is None else self._open_file.position
        return self._done_bytes + position, sum(status.st_size for status in self._files.values())

    def documents(self, start: int = 0) -> Iterator[Document]:
        self.skipped = Counter()
        self._done_bytes = 0
        if self._other_suffixes:
            self.skipped["not a known suffix"] = self._other_suffixes
        for path, status in self._files.items():
            self._open_file = self._file(path)
            yield from self._documents_of(self._open_file, start)
            start -= min(start, self._open_file.count)
            self._done_bytes += status.st_size
            self._open_file = None

    def _documents_of(self, file: DocumentFile, start: int) -> Iterator[Document]:
        if not file.has_fields and (self.rows.label is not None or self.rows.needs_fields):
            missing = (
                "messages or prompts" if self.rows.label is None else f"field {self.rows.label!r} (data.label_field)"
            )
            raise DataError(
                f"{file.path} is plain text, which has no {missing}; leave the option out, or move the file away"
            )
        label = stem_of(file.path) if self.rows.label is None and 1 < len(self._files) <= MOST_LABELLED_FILES else None
        for document in file.documents(start):
            yield document if label is None else document._replace(label=label)

    def _file(self, path: Path) -> DocumentFile:
        kind = format_of(path)
        assert kind is not None, path
        return kind(path, self.rows, self._encoding_of(path))

    def _encoding_of(self, path: Path) -> str | None:
        """Choose the first of several encodings that fits a file; if none of the others does, the last."""
        *earlier, last = (name.strip() for name in (self.encoding or "").split(","))
        for name in earlier:
            with open_decompressed(path) as (stream, _):
                if fits(stream, name):
                    return name
        return last or None


def _walk(root: Path, excluded_folders: frozenset[str]) -> dict[str, os.stat_result]:
    """List the files below `root` by relative path, sorted: file systems list them in different orders."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; make it readable") from error

    files: dict[str, os.stat_result] = {}
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [n for n in subfolders if n not in excluded_folders and not n.startswith(".")]
        for name in names:
            path = Path(folder, name)
            try:
                if not name.startswith(".") and path.is_file():
                    files[path.relative_to(root).as_posix()] = path.stat()
            except OSError as error:
                refuse(error)
    return dict(sorted(files.items()))


def _unpacked_bytes(path: Path) -> int:
    """Count the bytes of a compressed file's content."""
    count = 0
    with open_decompressed(path) as (content, _):
        while piece := content.read(_READ_BYTES):
            count += len(piece)
    return count
