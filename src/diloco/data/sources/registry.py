"""The sources. To add one: write a class in a file of its own, add it to `SOURCES`."""

from diloco.data.config import DataConfig
from diloco.data.sources.base import Source
from diloco.data.sources.hub import HuggingFaceDataset
from diloco.data.sources.local import LocalFiles, StandardLibrary

SOURCES: tuple[type[Source], ...] = (
    StandardLibrary,
    HuggingFaceDataset,
    LocalFiles,  # accepts every name as a path, so it must be last
)


def open_source(config: DataConfig) -> Source:
    """Open the source that `data.source` names."""
    for kind in SOURCES:
        source = kind.open(config)
        if source is not None:
            return source
    raise AssertionError(f"no source accepted {config.source!r}, though the last one in SOURCES accepts every name")
