"""How training passages are shared out among shards: i.i.d., by label, or by clusters of similar documents.

iid        a passage goes to the shard with the fewest tokens so far
labels     a label is in one shard whole, so that each worker reads labels of its own; the labels of all training
           passages are counted first, and the largest is placed first. A label that a long stream brings only later
           goes to the shard with the fewest tokens at that moment
clusters   k-means on the features of a pre-trained model's last layer, one cluster a shard (DiLoCo, section 3,
           non-i.i.d. data). Clusters are found on a bounded sample, then every passage goes to the nearest. Their sizes
           differ; they become the workers' weights

Labels and clusters are kept in a file, so that an interrupted preparation continues with the same ones. The feature
model is passed in as a function, since data does not import models. scikit-learn (extra `lab`) finds clusters; using
them needs none.
"""

import hashlib
import heapq
import io
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from diloco.atomic_files import write_file
from diloco.data.config import DataConfig
from diloco.data.preparation.passages import Passage, Passages
from diloco.data.sources.base import Source
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError, install_hint

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Labels = dict[str, int]
"""The shard of each label."""
ReportProgress = Callable[[str, int, int | None], None]
"""Called with (stage, done, total) while a corpus is prepared; `total` is None if it is unknown."""

CLUSTERS_FILE = "clusters.npz"
LABELS_FILE = "labels.json"
MAX_LABELS = 1024
STREAM_SAMPLE_PASSAGES = 1 << 16
SAMPLE_PASSAGES = 4096
PASSAGES_AT_ONCE = 64
CHARACTERS_PER_TOKEN = 16
"""More than any text has on average, so `length` tokens never need more characters than this."""
_REPORT_EVERY = 256


class Partition(ABC):
    """Assigns training passages to shards."""

    @abstractmethod
    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        """Return the shard of each (passage, number of tokens)."""


@final
class IidPartition(Partition):
    """Assigns a passage to the shard with the fewest tokens so far, so the sizes differ by at most a passage."""

    def __init__(self, loads: Sequence[int]) -> None:
        self._lightest = [(load, shard) for shard, load in enumerate(loads)]
        heapq.heapify(self._lightest)

    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        shards = []
        for _, length in passages:
            load, shard = self._lightest[0]
            heapq.heapreplace(self._lightest, (load + length, shard))
            shards.append(shard)
        return shards


# Labels


@final
class LabelPartition(Partition):
    """Assigns a passage to the shard of its label."""

    def __init__(self, labels: Labels, loads: Sequence[int], written: Mapping[str, Sequence[int]]) -> None:
        """`loads`: the tokens of each shard so far; `written`: those of each label in each shard."""
        late_labels = {
            label: list(tokens).index(max(tokens)) for label, tokens in written.items() if label not in labels
        }
        self._labels = labels | late_labels
        self._loads = list(loads)

    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        shards = []
        for passage, tokens in passages:
            label = checked_label(passage.label)
            shard = self._labels.setdefault(label, self._loads.index(min(self._loads)))
            self._loads[shard] += tokens
            shards.append(shard)
        return shards


def find_labels(passages: Iterable[Passage], shards: int, report: Callable[[], None]) -> Labels:
    """Count the training text of each label, and share the labels out evenly; `report` is called now and then."""
    sizes: Counter[str] = Counter()
    for number, passage in enumerate(passages):
        if not passage.is_validation:
            sizes[checked_label(passage.label)] += passage.size_bytes
        if len(sizes) > MAX_LABELS:
            raise DataError(
                f"data.partition = labels: the documents have more than {MAX_LABELS} different labels; choose a field "
                "that names few domains (--data.label_field)"
            )
        if number % _REPORT_EVERY == 0:
            report()
    if len(sizes) < 2:
        raise DataError(
            "data.partition = labels needs documents of at least two labels, and found: "
            f"{', '.join(sizes) or 'none'}; choose another --data.label_field, or --data.partition iid"
        )
    return share_out(sizes, shards)


def share_out(sizes: Mapping[str, int], shards: int) -> Labels:
    """Give each label, the largest first, to the shard with the least text."""
    loads = [0] * shards
    labels: Labels = {}
    for label, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        shard = loads.index(min(loads))
        labels[label] = shard
        loads[shard] += size
    return labels


def checked_label(label: str | None) -> str:
    if label is None:
        raise DataError(
            "data.partition = labels: the documents have no labels; name the field that has them (--data.label_field), "
            "or give a folder of 2 to 256 files, whose names are labels"
        )
    return label


# Clusters


@final
@dataclass(frozen=True)
class FeatureModel:
    """A model that gives features: its own tokenizer, and a function of the first `length` tokens of a text."""

    tokenizer: Tokenizer
    length: int
    features: Callable[[Int64], Float32]
    """[n, length] tokens, −1 after the end of a shorter passage -> [n, D]."""

    def compute(self, texts: Sequence[str]) -> Float32:
        """Compute [n, D] features of the texts."""
        encoded = self.tokenizer.encode_batch([text[: self.length * CHARACTERS_PER_TOKEN] for text in texts])
        tokens = np.full((len(texts), self.length), -1, np.int64)
        for row, text_tokens in zip(tokens, encoded, strict=True):
            first_tokens = text_tokens[: self.length] or [self.tokenizer.end_of_text]
            row[: len(first_tokens)] = first_tokens
        return self.features(tokens)


LoadFeatures = Callable[[Path], FeatureModel]


@final
@dataclass(frozen=True)
class Clusters:
    """Cluster centres, in features scaled to mean 0 and variance 1 over the sample."""

    mean: Float32
    scale: Float32
    centres: Float32

    @classmethod
    def fit(cls, features: Float32, sizes: Int64, clusters: int) -> "Clusters":
        """Run k-means on [n, D] features. The same features give the same clusters.

        Passages are weighted by size: otherwise short documents would take most clusters, and long ones share the
        rest.
        """
        try:
            from sklearn.cluster import KMeans
        except ImportError as error:
            raise DataError(f"data.partition = clusters needs scikit-learn: {install_hint('lab')}") from error
        distinct = len(np.unique(features, axis=0))
        if distinct < clusters:
            raise DataError(
                f"data.partition = clusters: {len(features)} passages with {distinct} different features cannot make "
                f"{clusters} clusters (data.shards): give more text, or fewer shards"
            )
        mean = features.mean(0)
        scale = features.std(0) + 1e-6
        means = KMeans(clusters, n_init=10, random_state=0).fit((features - mean) / scale, sample_weight=sizes)
        return cls(mean, scale, means.cluster_centers_.astype(np.float32))

    def assign(self, features: Float32) -> Int64:
        """Return [n]: the index of the nearest centre of each row."""
        scaled = (features - self.mean) / self.scale
        # |x − c|² without |x|², which is the same for all c
        distances = (self.centres**2).sum(1) - 2 * scaled @ self.centres.T
        return np.asarray(distances.argmin(1), np.int64)

    def save(self, path: Path) -> None:
        content = io.BytesIO()
        np.savez(content, mean=self.mean, scale=self.scale, centres=self.centres)
        write_file(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Clusters":
        with np.load(path, allow_pickle=False) as arrays:
            return cls(arrays["mean"], arrays["scale"], arrays["centres"])


@final
class ClusterPartition(Partition):
    """Assigns a passage to the shard of the nearest cluster centre."""

    def __init__(self, model: FeatureModel, clusters: Clusters) -> None:
        self._model = model
        self._clusters = clusters

    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        if not passages:
            return []
        features = self._model.compute([passage.text for passage, _ in passages])
        shards: list[int] = self._clusters.assign(features).tolist()
        return shards


def find_clusters(
    passages: Iterable[Passage], model: FeatureModel, clusters: int, progress: ReportProgress
) -> Clusters:
    """Find the clusters of a source on a sample of its passages."""
    sampled = sample(passages, model.length)
    if not sampled:
        raise DataError("data.partition = clusters: the source has no text to group; give more text")
    parts = []
    for start in range(0, len(sampled), PASSAGES_AT_ONCE):
        progress("finding clusters", start, len(sampled))
        parts.append(model.compute([text for text, _ in sampled[start : start + PASSAGES_AT_ONCE]]))
    progress("finding clusters", len(sampled), len(sampled))
    sizes = np.array([size for _, size in sampled], np.int64)
    return Clusters.fit(np.concatenate(parts), sizes, clusters)


def sample(passages: Iterable[Passage], length: int) -> list[tuple[str, int]]:
    """Return the beginnings of at most SAMPLE_PASSAGES training passages, and the sizes of these passages in bytes.

    The passages with the smallest hashes: each has the same chance, whatever its position and their number.
    """
    smallest: list[tuple[int, str, int]] = []  # a heap: the largest hash first
    for passage in passages:
        if passage.is_validation:
            continue
        digest = int.from_bytes(hashlib.blake2b(passage.text.encode(), digest_size=8).digest(), "big")
        item = (-digest, passage.text[: length * CHARACTERS_PER_TOKEN], passage.size_bytes)
        if len(smallest) < SAMPLE_PASSAGES:
            heapq.heappush(smallest, item)
        elif item > smallest[0]:
            heapq.heapreplace(smallest, item)
    return [(text, size) for _, text, size in sorted(smallest, reverse=True)]


def model_identity(folder: str) -> list[tuple[str, int, int]]:
    """Identify a feature model in the cache: path, size and time of its files."""
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise DataError(f"data.feature_model {folder!r} is not a folder: give the folder of a saved model")
    files = sorted(file for file in path.iterdir() if file.is_file())
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


# The partition that a configuration names


def open_partition(
    config: DataConfig,
    source: Source,
    folder: Path,
    loads: Sequence[int],
    label_tokens: Mapping[str, Sequence[int]],
    progress: ReportProgress,
    load_features: LoadFeatures | None,
) -> Partition:
    """Return the partition of `data.partition`, continued from the last commit of an interrupted preparation.

    `loads`: the tokens of each shard so far; `label_tokens`: those of each label.
    """
    if config.partition == "iid":
        return IidPartition(loads)
    passages = Passages(source, config)
    bounded: Iterable[Passage] = passages
    if passages.size_bytes is None:  # a stream may have no end
        bounded = islice(passages, STREAM_SAMPLE_PASSAGES)
    if config.partition == "labels":
        path = folder / LABELS_FILE
        if not path.exists():
            labels_found = find_labels(
                bounded, config.shards, lambda: progress("counting labels", *passages.progress())
            )
            write_file(path, json.dumps(labels_found))
        labels: Labels = json.loads(path.read_text(encoding="utf-8"))
        return LabelPartition(labels, loads, label_tokens)
    assert config.feature_model is not None
    if load_features is None:
        raise DataError("data.partition = clusters needs a feature model: call prepare() with load_features")
    model = load_features(Path(config.feature_model).expanduser())
    path = folder / CLUSTERS_FILE
    if not path.exists():
        find_clusters(bounded, model, config.shards, progress).save(path)
    return ClusterPartition(model, Clusters.load(path))
