"""Non-i.i.d. shards: k-means on a pre-trained model's features, one cluster per shard.

Paper (DiLoCo, section 3, non-i.i.d. data): the shards are clusters of documents by the features of a pre-trained
model's last layer. Clusters are found on a bounded sample, then every training passage goes to the nearest. Their
sizes differ; they become the workers' weights. The model is passed in as a function, since data does not import models.
Needs scikit-learn (extra `lab`) to find clusters, not to use them.
"""

import hashlib
import heapq
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from diloco.atomic_files import write_file
from diloco.data.preparation.passages import Passage
from diloco.data.preparation.writer import Partition
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError, install_hint

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

SAMPLE_PASSAGES = 4096
AT_ONCE = 64
CHARACTERS_PER_TOKEN = 16
"""More than any text has on average, so `length` tokens never need more characters than this."""

Report = Callable[[int, int], None]
"""Called with (done, total)."""


@final
@dataclass(frozen=True)
class FeatureModel:
    """A model that gives features: its own tokenizer, and a function of the first `length` tokens of a text."""

    tokenizer: Tokenizer
    length: int
    features: Callable[[Int64], Float32]
    """[n, length] tokens, −1 after the end of a shorter passage -> [n, D]."""

    def of(self, texts: Sequence[str]) -> Float32:
        """[n, D] features of the texts."""
        encoded = self.tokenizer.encode_batch([text[: self.length * CHARACTERS_PER_TOKEN] for text in texts])
        tokens = np.full((len(texts), self.length), -1, np.int64)
        for row, found in zip(tokens, encoded, strict=True):
            seen = found[: self.length] or [self.tokenizer.end_of_text]
            row[: len(seen)] = seen
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
        """k-means on [n, D] features. The same features give the same clusters.

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
        found = KMeans(clusters, n_init=10, random_state=0).fit((features - mean) / scale, sample_weight=sizes)
        return cls(mean, scale, found.cluster_centers_.astype(np.float32))

    def assign(self, features: Float32) -> Int64:
        """[n]: the index of the nearest centre of each row."""
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
    def __init__(self, model: FeatureModel, clusters: Clusters) -> None:
        self._model, self._clusters = model, clusters

    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        if not passages:
            return []
        features = self._model.of([passage.text for passage, _ in passages])
        shards: list[int] = self._clusters.assign(features).tolist()
        return shards


def sample(passages: Iterable[Passage], length: int) -> list[tuple[str, int]]:
    """The beginnings of at most SAMPLE_PASSAGES training passages, and the sizes of these passages in bytes.

    The passages with the smallest hashes: each has the same chance, whatever its position and their number.
    """
    kept: list[tuple[int, str, int]] = []  # a heap: the largest hash first
    for passage in passages:
        if passage.is_validation:
            continue
        digest = int.from_bytes(hashlib.blake2b(passage.text.encode(), digest_size=8).digest(), "big")
        item = (-digest, passage.text[: length * CHARACTERS_PER_TOKEN], passage.size_bytes)
        if len(kept) < SAMPLE_PASSAGES:
            heapq.heappush(kept, item)
        elif item > kept[0]:
            heapq.heapreplace(kept, item)
    return [(text, size) for _, text, size in sorted(kept, reverse=True)]


def find_clusters(passages: Iterable[Passage], model: FeatureModel, clusters: int, report: Report) -> Clusters:
    """The clusters of a source; `report` is called with the passages processed and all."""
    chosen = sample(passages, model.length)
    if not chosen:
        raise DataError("data.partition = clusters: the source has no text to group; give more text")
    parts = []
    for start in range(0, len(chosen), AT_ONCE):
        report(start, len(chosen))
        parts.append(model.of([text for text, _ in chosen[start : start + AT_ONCE]]))
    report(len(chosen), len(chosen))
    sizes = np.array([size for _, size in chosen], np.int64)
    return Clusters.fit(np.concatenate(parts), sizes, clusters)


def model_identity(folder: str) -> list[tuple[str, int, int]]:
    """Identifies a feature model in the cache: path, size and time of its files."""
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise DataError(f"data.feature_model {folder!r} is not a folder: give the folder of a saved model")
    files = sorted(file for file in path.iterdir() if file.is_file())
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
