"""The partition that `data.partition` names, continued from the last commit of an interrupted preparation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from diloco.data.config import DataConfig
from diloco.data.preparation.clusters import ClusterPartition, Clusters, LoadFeatures, find_clusters
from diloco.data.preparation.labels import LabelPartition, find_labels, load_labels, save_labels
from diloco.data.preparation.passages import Passage, Passages
from diloco.data.preparation.writer import IidPartition, Partition
from diloco.data.sources.base import Source
from diloco.errors import DataError

CLUSTERS, LABELS = "clusters.npz", "labels.json"
STREAM_SAMPLE_PASSAGES = 1 << 16

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, done, total) while a corpus is prepared; `total` is None if it is unknown."""


def open_partition(
    config: DataConfig,
    source: Source,
    folder: Path,
    loads: Sequence[int],
    label_tokens: Mapping[str, Sequence[int]],
    progress: Progress,
    load_features: LoadFeatures | None,
) -> Partition:
    """`loads`: the tokens of each shard so far; `label_tokens`: those of each label."""
    if config.partition == "iid":
        return IidPartition(loads)
    passages = Passages(source, config)
    bounded: Iterable[Passage] = passages
    if passages.size_bytes is None:  # a stream may have no end
        bounded = islice(passages, STREAM_SAMPLE_PASSAGES)
    if config.partition == "labels":
        path = folder / LABELS
        if not path.exists():
            save_labels(
                path, find_labels(bounded, config.shards, lambda: progress("counting labels", *passages.progress()))
            )
        return LabelPartition(load_labels(path), loads, label_tokens)
    assert config.feature_model is not None
    if load_features is None:
        raise DataError("data.partition = clusters needs a feature model: call prepare() with load_features")
    model = load_features(Path(config.feature_model).expanduser())
    path = folder / CLUSTERS
    if not path.exists():

        def report(done: int, total: int) -> None:
            progress("finding clusters", done, total)

        find_clusters(bounded, model, config.shards, report).save(path)
    return ClusterPartition(model, Clusters.load(path))
