"""Hugging Face datasets: `hf:NAME[:CONFIG][@SPLIT]`, streamed; NAME is one on the hub, or a folder of the same format.

A folder may be what a dataset repository holds (data files, a README with configurations) or what `save_to_disk`
wrote. Nothing is downloaded as a whole. The hub is first asked once, with a time limit, so that a missing network, an
unknown name or a gated dataset is reported within seconds. The cache identifies a hub dataset by name, configuration
and split, so a prepared corpus is found without a network. The revision is pinned while it is read; an interrupted
preparation starts again if the revision has changed.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from diloco.data.config import DataConfig
from diloco.data.hub_errors import HUB_SECONDS, PREFIX, hub_error
from diloco.data.sources.base import Document, Source
from diloco.data.sources.rows import Rows, TextRows, rows_of
from diloco.errors import DataError, install_hint

DISK_FILES = ("dataset_dict.json", "state.json")
"""The files that `save_to_disk` writes for several splits, and for one."""


@final
class HuggingFaceDataset(Source):
    def __init__(self, name: str, config_name: str | None, split: str | None, rows: Rows | None = None) -> None:
        super().__init__()
        self.name = name
        self.config_name = config_name
        self.split = split
        self.rows = rows or TextRows()
        self.chat_template = self.rows.chat_template
        self.folder = _folder(name)
        self._on_disk = self.folder is not None and any((self.folder / file).is_file() for file in DISK_FILES)
        if self._on_disk and config_name is not None:
            raise DataError(f"{self}: what save_to_disk wrote has no configurations: leave out ':{config_name}'")
        self._revision: str | None = None
        self._yielded = 0
        self._total: int | None = None

    @classmethod
    def open(cls, config: DataConfig) -> "HuggingFaceDataset | None":
        if not config.source.startswith(PREFIX):
            return None
        if config.encoding is not None:
            raise DataError(
                f"data.encoding is {config.encoding!r}, but an hf: source has no files to decode: leave it out"
            )
        return cls(*parse(config.source), rows_of(config))

    def __str__(self) -> str:
        """Name the source as the user does, for messages."""
        config_name = f":{self.config_name}" if self.config_name else ""
        return f"data.source '{PREFIX}{self.name}{config_name}{f'@{self.split}' if self.split else ''}'"

    def identity(self) -> dict[str, object]:
        files = []
        if self.folder is not None:
            paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
            files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        name = self.name if self.folder is None else str(self.folder)
        return {"kind": "hf", "name": name, "config": self.config_name, "split": self.split, "files": files,
                "rows": self.rows.identity()}  # fmt: skip

    @property
    def size_bytes(self) -> None:
        """Always unknown, so that a folder and its original on the hub give the same corpus."""
        return None

    def progress(self) -> tuple[int, int | None]:
        return self._yielded, self._total

    def fingerprint(self) -> str:
        if self.folder is not None:
            return ""
        if self._revision is None:
            self._revision = _revision(self.name, str(self))
        return self._revision

    def documents(self, start: int = 0) -> Iterator[Document]:
        self.skipped = Counter()
        self._yielded = start
        rows = self._rows(start)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # datasets raises whatever its readers and transports raise
                raise hub_error(str(self), error, "; configuration and split go into hf:NAME:CONFIG@SPLIT") from error
            self._yielded += 1
            yield self.rows.document(row, f"{self}, row {self._yielded}")

    def _rows(self, start: int) -> Iterator[Any]:
        dataset = self._saved() if self._on_disk else self._streamed()
        self._check_fields(dataset.column_names)
        if dataset.column_names is not None and self.rows.names is not None:
            dataset = dataset.select_columns(self.rows.names)
        yield from dataset.skip(start)

    def _streamed(self) -> Any:
        datasets = _import_datasets()
        revision = self.fingerprint() or None
        path_or_name = self.name if self.folder is None else str(self.folder)
        dataset = datasets.load_dataset(
            path_or_name, self.config_name, split=self.split or "train", streaming=True, revision=revision
        )
        splits = dataset.info.splits or {}
        split_info = splits.get(self.split or "train")
        self._total = split_info.num_examples or None if split_info is not None else None
        return dataset

    def _saved(self) -> Any:
        dataset = _import_datasets().load_from_disk(str(self.folder))
        if isinstance(dataset, dict):
            name = self.split or "train"
            if name not in dataset:
                raise DataError(f"{self} has no split {name!r}; it has: {', '.join(dataset)}. Give one as @SPLIT")
            dataset = dataset[name]
        elif self.split is not None and self.split != str(dataset.split):
            raise DataError(f"{self} was saved as a single split ({dataset.split}): leave out '@{self.split}'")
        self._total = len(dataset)
        return dataset

    def _check_fields(self, columns: list[str] | None) -> None:
        if columns is not None:
            try:
                self.rows.check_columns(columns)
            except DataError as error:
                raise DataError(f"{self} {error}") from error


def parse(spec: str) -> tuple[str, str | None, str | None]:
    """Return (name, configuration, split) of `hf:NAME[:CONFIG][@SPLIT]`; a path may contain : and @."""
    locator = spec.removeprefix(PREFIX)
    if _folder(locator) is not None:
        return locator, None, None
    name, _, split = locator.partition("@") if "@" in locator.rpartition("/")[2] else (locator, "", "")
    name, _, config_name = name.partition(":")
    if not name or ("@" in locator and not split) or (":" in locator and not config_name):
        raise DataError(f"data.source {spec!r} is not of the form hf:NAME[:CONFIG][@SPLIT], as in hf:allenai/c4:en")
    if name.startswith(("/", "./", "../", "~")) and _folder(name) is None:
        raise DataError(f"data.source {spec!r}: there is no folder {name}")
    return name, config_name or None, split or None


def _folder(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path.resolve() if name and path.is_dir() else None


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hf: sources need the datasets library: {install_hint('hf')}") from error
    return datasets


def _revision(name: str, subject: str) -> str:
    """Return the current commit of the dataset; also the quick check whether it can be reached at all."""
    _import_datasets()
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, timeout=HUB_SECONDS).sha)
    except Exception as error:  # any error of the HTTP library below
        raise hub_error(subject, error) from error
