"""The options of the data. Checks values only: `prepare` checks that files and names exist."""

import codecs
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
    """`stdlib` (this Python's own library), a file or folder (text, .jsonl, .json, .csv, .parquet), or
    hf:NAME[:CONFIG][@SPLIT]."""

    format: Literal["text", "chat", "completion"] = "text"
    """What a row holds: a text, a conversation (`messages`), or `prompt` and `completion`."""

    text_field: str = "text"
    """The field of a row that is the document; of a conversation, the one with its messages."""

    label_field: str | None = None
    """The field that says where a document comes from, to measure or make a partition (default: the file's name)."""

    encoding: str | None = None
    """The encoding of files without a byte-order mark, such as latin-1 (default: UTF-8). Several with commas: each file
    is read in the first one that fits all of it."""

    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row or file that cannot be used is an error, or is left out and counted."""

    chat_template: str | None = option(None, may_change=True, may_differ="always")
    """For conversations: a file with a Jinja template, or chatml (default: the tokenizer's own template)."""

    loss_on: Literal["answers", "all"] | None = None
    """For conversations and completions: the tokens that are learnt (default: answers)."""

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

    partition: Literal["iid", "clusters", "labels"] = option("iid", may_differ="always")
    """How documents are assigned to shards: evenly, a cluster of similar documents each, or whole labels."""

    feature_model: str | None = option(None, may_change=True, may_differ="always")
    """With partition = clusters: the folder of the model whose last layer gives the features."""

    validation_fraction: float = 0.02
    """Part of the text held out for validation: the same passages whatever the workers, seed and shards."""

    cache_dir: str | None = option(None, may_change=True, may_differ="always")
    """Folder for prepared corpora; by default $XDG_CACHE_HOME/diloco, else ~/.cache/diloco."""

    def __post_init__(self) -> None:
        optional = ("label_field", "encoding", "chat_template", "tokenizer", "feature_model", "cache_dir")
        for name in ("source", "text_field", *optional):
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
        self._check_rows()
        self._check_partition()

    @property
    def has_row_options(self) -> bool:
        """Whether an option says something about the fields of rows."""
        return (self.format, self.text_field, self.label_field) != ("text", "text", None)

    @property
    def learns_answers_only(self) -> bool:
        return self.format != "text" and self.loss_on != "all"

    def _check_rows(self) -> None:
        self._check_choice("format", "text", "chat", "completion")
        self._check_choice("on_bad_row", "fail", "skip")
        if self.loss_on is not None:
            self._check_choice("loss_on", "answers", "all")
        for name in ("chat_template", "loss_on"):
            if self.format == "text" and getattr(self, name) is not None:
                raise ConfigError(
                    f"data.{name} is {getattr(self, name)!r}, but is for conversations: add --data.format chat (or "
                    "completion), or leave it out"
                )
        if self.format == "completion" and self.text_field != "text":
            raise ConfigError(
                f"data.text_field is {self.text_field!r}, but data.format = completion reads the fields prompt and "
                "completion: leave it out"
            )
        if self.encoding is not None:
            try:
                for name in self.encoding.split(","):
                    "".encode(codecs.lookup(name.strip()).name)
            except (LookupError, ValueError) as error:
                raise ConfigError(
                    f"data.encoding is {self.encoding!r}, but must be an encoding that Python knows, such as utf-8, "
                    "latin-1, cp1252, utf-16-le, shift_jis or gb18030, or several with commas"
                ) from error

    def _check_choice(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            allowed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
            raise ConfigError(f"data.{name} is {getattr(self, name)!r}, but must be {allowed}")

    def _check_partition(self) -> None:
        self._check_choice("partition", "iid", "clusters", "labels")
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
