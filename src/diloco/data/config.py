"""What the user may say about the data. Checks values only: `prepare` finds out what exists."""

from dataclasses import dataclass

from diloco.errors import ConfigError

DEFAULT_VOCAB_SIZE = 2048
SMALLEST_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token: less would not be lossless
LARGEST_VOCAB_SIZE = 2**20
LARGEST_SHARD_COUNT = 2**16  # a shard is a file


@dataclass(frozen=True)
class DataConfig:
    """The text that is trained on, how it is cut into tokens and how it is dealt to the workers."""

    source: str = "stdlib"
    """`stdlib` (the running Python's own library), or the path of a text file or a folder of such."""

    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Tokens of the byte-level BPE trained on the source; fewer where the text does not support so many."""

    tokenizer: str | None = None
    """Path of an existing tokenizer.json to use as it is, instead of training one."""

    sequence_length: int = 128
    """Tokens the model predicts in one sequence."""

    shards: int = 16
    """Disjoint parts of the training text; worker i of k reads parts i, i+k, …, so workers ≤ shards."""

    validation_fraction: float = 0.02
    """Part of the text held out for validation: the same passages whatever the workers, seed and shards."""

    cache_dir: str | None = None
    """Folder for prepared corpora; by default $XDG_CACHE_HOME/diloco, else ~/.cache/diloco."""

    def __post_init__(self) -> None:
        self._check_text("source", self.source)
        if self.tokenizer is not None:
            self._check_text("tokenizer", self.tokenizer)
        if self.cache_dir is not None:
            self._check_text("cache_dir", self.cache_dir)
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
