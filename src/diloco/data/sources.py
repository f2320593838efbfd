"""Where the text comes from: the documents of a source, always in the same order.

A source yields whole documents as `str` and says who it is (`identity`), so that a prepared corpus can be
found again without reading the text. It decides nothing about tokens, splits or shards. A file that cannot be
used is skipped and counted, never repaired: half-decoded text is worse than none. A file that the system
refuses to read is an error, because a worker that silently lacks a part of the data would differ from the
others.

To add a source: write one class, add it to `SOURCES`.
"""

import ast
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, final

from diloco.errors import DataError

TEXT_SUFFIXES: tuple[str, ...] = (
    "",  # README, LICENSE, enwik8
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log"),
    *(".html", ".htm", ".xml", ".css", ".csv", ".tsv", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".el"),
    *(".sh", ".bash", ".sql", ".swift", ".lisp", ".cmake"),
)
"""A file is text by its suffix alone, so that which files are used can be known without opening them."""


class Source(ABC):
    """Documents in a fixed order. `skipped` counts by reason what the last walk over them left out."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()

    @classmethod
    @abstractmethod
    def open(cls, spec: str) -> "Source | None":
        """The source that `data.source = spec` names, or None where this is not the kind that `spec` means.

        DataError where it is the kind, but there is nothing to be had.
        """

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """JSON that changes whenever the documents may have changed. Runs at every start: read nothing."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """About how much text there is: for progress, and for the size of passages and samples."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """All documents. May be walked several times and gives the same each time."""


@final
class StandardLibrary(Source):
    """The running interpreter's library and the prose of `pydoc_data`: text that is on every machine.

    Left out are the tests (the bulk of it, deliberately broken files among them, and Debian ships none) and
    the character tables of `encodings`, which are data rather than text.
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
        if not self._files:
            raise DataError(
                f"data.source 'stdlib': there is no Python source under {self.root}; this interpreter keeps "
                "its library elsewhere (frozen or zipped?), so give a text file or folder with --data.source"
            )

    @classmethod
    def open(cls, spec: str) -> "StandardLibrary | None":
        return cls() if spec == "stdlib" else None

    def identity(self) -> dict[str, object]:
        # Sizes but no times: reinstalling the same interpreter gives the same text.
        version = f"{platform.python_implementation()} {platform.python_version()}"
        files = [(name, status.st_size) for name, status in self._files.items()]
        return {"kind": "stdlib", "version": version, "root": str(self.root), "files": files}

    @property
    def size_bytes(self) -> int:
        return sum(status.st_size for status in self._files.values())

    def documents(self) -> Iterator[str]:
        self.skipped = Counter()
        for name in self._files:
            text = _read_text(self.root / name)
            if text is None:
                self.skipped["not UTF-8 text"] += 1
            elif name == self.TOPICS:
                yield from self._topics(text)
            else:
                yield text

    @staticmethod
    def _topics(text: str) -> Iterator[str]:
        """The prose itself: as source it would be escaped strings, one page to a line in older versions."""
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                topics: dict[str, str] = ast.literal_eval(statement.value)
                yield from (topics[name] for name in sorted(topics))


@final
class LocalText(Source):
    """A text file, or the text files of a folder and its subfolders, hidden ones left out."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._is_folder = path.is_dir()
        if self._is_folder:
            found = _walk(path, frozenset({"__pycache__"}))
            self._files = {path / n: s for n, s in found.items() if Path(n).suffix.lower() in TEXT_SUFFIXES}
            self._other_suffixes = len(found) - len(self._files)
            if not self._files:
                raise DataError(
                    f"data.source {str(path)!r}: none of the {len(found)} files in this folder is a text "
                    f"file; known suffixes are: {_suffix_list()}"
                )
        else:
            if path.suffix.lower() not in TEXT_SUFFIXES:
                raise DataError(
                    f"data.source {str(path)!r}: {path.suffix!r} is not the suffix of a text file; convert "
                    f"or rename it to one of: {_suffix_list()}"
                )
            self._files = {path: path.stat()}
            self._other_suffixes = 0

    @classmethod
    def open(cls, spec: str) -> "LocalText":
        path = Path(spec).expanduser()
        try:
            usable = path.is_file() or path.is_dir()
        except OSError as error:
            raise DataError(f"data.source {spec!r} cannot be looked at: {error}; make it readable") from error
        if not usable:
            raise DataError(
                f"data.source {spec!r}: there is no such file or folder (looked for {path.absolute()}); give "
                "the path of a text file or folder, or 'stdlib' for the Python library"
            )
        return cls(path.resolve())

    def identity(self) -> dict[str, object]:
        files = [(str(path), status.st_size, status.st_mtime_ns) for path, status in self._files.items()]
        return {"kind": "local", "files": files}

    @property
    def size_bytes(self) -> int:
        return sum(status.st_size for status in self._files.values())

    def documents(self) -> Iterator[str]:
        self.skipped = Counter()
        if self._other_suffixes:
            self.skipped["not a known text suffix"] = self._other_suffixes
        for path in self._files:
            text = _read_text(path)
            if text is not None:
                yield text
            elif self._is_folder:
                self.skipped["not UTF-8 text"] += 1
            else:
                raise DataError(f"data.source {str(path)!r} is not UTF-8 text; convert it (iconv -t UTF-8)")


SOURCES: tuple[type[Source], ...] = (
    StandardLibrary,
    LocalText,  # takes every spec for a path, so it stays last
)


def open_source(spec: str) -> Source:
    """The source that `data.source = spec` names."""
    for kind in SOURCES:
        source = kind.open(spec)
        if source is not None:
            return source
    raise AssertionError(f"no source took {spec!r}, though the last in SOURCES takes all")


def _suffix_list() -> str:
    return " ".join(suffix or "(none)" for suffix in TEXT_SUFFIXES)


def _walk(root: Path, excluded_folders: frozenset[str]) -> dict[str, os.stat_result]:
    """Files below `root` by relative path, sorted: file systems list them in different orders."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot look at {error.filename}: {error.strerror}; make it readable") from error

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


def _read_text(path: Path) -> str | None:
    """The text with its line ends as they are; None where it is not UTF-8 text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it readable or move it away") from error
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
