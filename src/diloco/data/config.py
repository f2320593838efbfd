"""The options of the data. Checks values only: `prepare` checks that files and names exist."""

from dataclasses import dataclass
from typing import Literal

from diloco.core.options import option
from diloco.errors import ConfigError

DEFAULT_VOCAB_SIZE = 2048
SMALLEST_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token: less would not be lossless
LARGEST_VOCAB_SIZE = 2**20
LARGEST_SHARD_COUNT = 2**16  # a shard is a file


@dataclass(frozen=True)
class DataConfig:
    """The training text, how it is tokenised and how it is divided among the workers.

    Options that may differ only locate the text, or are covered by the digest of the prepared corpus.
    """

    source: str = option("stdlib", may_change=True, may_differ="always")
    """`stdlib` (this Python's own library), a file or folder (text, .jsonl, .parquet), or hf:NAME[:CONFIG][@SPLIT]."""

    text_field: str = "text"
    """The field of a .jsonl line, Parquet row or dataset row that is the document."""

    label_field: str | None = None
    """The field that says where a document comes from, to measure a partition (default: the name of its file)."""

    max_documents: int | None = None
    """Use at most this many documents, from the beginning of the source."""

    max_bytes: int | None = None
    """Use at most this many bytes of text, from the beginning of the source; the last document is cut."""

    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Tokens of the byte-level BPE trained on the source; fewer if the text does not have enough pairs to merge."""

    tokenizer: str | None = option(None, may_change=True, may_differ="always")
    """A tokenizer.json, a folder with one, or hf:NAME: used unchanged, instead of training one."""

    sequence_length: int = option(128, may_differ="never")
    """Tokens the model predicts in one sequence."""

    shards: int = 16
    """Disjoint parts of the training text; worker i of k reads parts i, i+k, …, so workers ≤ shards."""

    partition: Literal["iid", "clusters"] = option("iid", may_differ="always")
    """How documents are assigned to shards: evenly, or one cluster of similar documents each (k-means on features)."""

    feature_model: str | None = option(None, may_change=True, may_differ="always")
    """With partition = clusters: the folder of the model whose last layer gives the features."""

    validation_fraction: float = 0.02
    """Part of the text held out for validation: the same passages whatever the workers, seed and shards."""

    cache_dir: str | None = option(None, may_change=True, may_differ="always")
    """Folder for prepared corpora; by default $XDG_CACHE_HOME/diloco, else ~/.cache/diloco."""

    def __post_init__(self) -> None:
        for name in ("source", "text_field", "label_field", "tokenizer", "feature_model", "cache_dir"):
            if getattr(self, name) is not None or name in ("source", "text_field"):
                self._check_text(name, getattr(self, name))
        for name in ("max_documents", "max_bytes"):
            if getattr(self, name) is not None:
                self._check_integer(name, getattr(self, name), 1, None)
        self._check_integer("vocab_size", self.vocab_size, SMALLEST_VOCAB_SIZE, LARGEST_VOCAB_SIZE)
        self._check_integer("sequence_length", self.sequence_length, 1, None)
        self._check_integer("shards", self.shards, 1, LARGEST_SHARD_COUNT)
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise ConfigError(
                f"data.validation_fraction is {fraction!r}, but must lie between 0 and 1 (both excluded), "
                "because every run reports a validation loss: 0.02 is a good choice"
            )
        if self.tokenizer is not None and self.vocab_size != DEFAULT_VOCAB_SIZE:
            raise ConfigError(
                f"data.vocab_size is {self.vocab_size}, but data.tokenizer {self.tokenizer!r} brings its own "
                "vocabulary: leave out one of the two"
            )

        self._check_partition()

    def _check_partition(self) -> None:
        if self.partition not in ("iid", "clusters"):
            raise ConfigError(f"data.partition is {self.partition!r}, but must be 'iid' or 'clusters'")
        if self.partition == "clusters" and self.feature_model is None:
            raise ConfigError(
                "data.partition = clusters groups documents by a model's features: name its folder with "
                "--data.feature_model (the model/ of an earlier run will do)"
            )
        if self.partition != "clusters" and self.feature_model is not None:
            raise ConfigError(
                f"data.feature_model is {self.feature_model!r}, but is used only with data.partition = clusters: add "
                "--data.partition clusters, or leave it out"
            )

    @staticmethod
    def _check_text(name: str, value: object) -> None:
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"data.{name} is {value!r}, but must be a non-empty text: give it or leave it out")

    @staticmethod
    def _check_integer(name: str, value: object, least: int, most: int | None) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and least <= value and (most is None or value <= most):  # type: ignore[operator]
            return
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"data.{name} is {value!r}, but must be a whole number, {bounds}")
