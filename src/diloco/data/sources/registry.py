"""The sources. To add one: write a class in a file of its own, add it to `SOURCES`."""

from diloco.data.config import DataConfig
from diloco.data.sources.base import Source
from diloco.data.sources.hub import HuggingFaceDataset
from diloco.data.sources.local import LocalFiles, StandardLibrary

SOURCES: tuple[type[Source], ...] = (
    StandardLibrary,
    HuggingFaceDataset,
    LocalFiles,  # takes every name for a path, so it stays last
)


def open_source(config: DataConfig) -> Source:
    """The source that `data.source` names."""
    for kind in SOURCES:
        source = kind.open(config)
        if source is not None:
            return source
    raise AssertionError(f"no source took {config.source!r}, though the last in SOURCES takes all")
