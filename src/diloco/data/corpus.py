"""A prepared corpus: a folder of flat, memory-mapped token files, and their counts.

    tokenizer.json   the tokenizer; tokenizer_config.json beside it names its end-of-text token
    train-00000.bin  one file a shard: little-endian uint16 or uint32 tokens, an end-of-text token after each passage;
                     in a corpus with a loss mask, the highest bit marks the tokens that are not learnt
    validation.bin   the held-out passages
    meta.json        sizes, counts, digest; written last

`Corpus` holds numbers and a path only: it is cheap to open and to send to another process, and maps the files on
demand. A folder whose files do not match its meta.json is refused. A worker of a swarm may hold only some of the
shards; each of those must be complete.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from diloco.errors import DataError

FORMAT_VERSION = 4
"""Part of every cache key: raise it when the same settings would give other files."""

META = "meta.json"
TOKENIZER = "tokenizer.json"
VALIDATION = "validation.bin"

Tokens = NDArray[np.unsignedinteger[Any]]


def shard_name(shard: int) -> str:
    return f"train-{shard:05d}.bin"


def corpus_digest(
    tokenizer: bytes, files: Mapping[str, str], *, masked: bool = False, chat_template: str | None = None
) -> str:
    """SHA-256 of tokenizer.json, of the names and SHA-256 of the other files in their order; and, in a corpus of
    conversations, of the chat template and whether there is a loss mask."""
    hasher = hashlib.sha256(tokenizer)
    if masked or chat_template is not None:
        hasher.update(json.dumps([masked, chat_template]).encode() + b"\n")
    for name, digest in files.items():
        hasher.update(f"{name} {digest}\n".encode())
    return hasher.hexdigest()


def token_dtype(vocab_size: int, *, masked: bool = False) -> np.dtype[Any]:
    """Return the smallest type for token numbers, in a fixed byte order: a folder may be copied between machines. With
    a loss mask, the highest bit is the mask's."""
    return np.dtype("<u2" if vocab_size <= 2 ** (15 if masked else 16) else "<u4")


def mask_bit(dtype: np.dtype[Any]) -> int:
    """Return the bit of a token that is not learnt, in a corpus with a loss mask."""
    return int(1 << (8 * dtype.itemsize - 1))


@final
@dataclass(frozen=True)
class CorpusMeta:
    """The content of meta.json."""

    vocab_size: int
    """Rows of the model's embedding; less than data.vocab_size if the text has no more pairs to merge."""
    end_of_text: int
    shard_tokens: tuple[int, ...]
    validation_tokens: int
    documents: int
    """Documents of the source that were used; duplicates and empty ones are in `skipped`."""
    characters: int
    train_bytes: int
    """UTF-8 bytes of the training text; divided by the tokens, the bytes of a token."""
    validation_bytes: int
    unigram_perplexity: float
    """Validation perplexity of the training text's token frequencies (add-one): the baseline for a model."""
    tokenizer_bytes: int
    digest: str
    """Digest of the tokenizer and all tokens: equal on two machines if and only if they prepared the same corpus."""
    skipped: dict[str, int]
    """Files and documents left out, by reason."""
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of validation.bin and of each shard, in this order; `digest` covers them."""
    partition: str = "iid"
    label_tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Training tokens of each label in each shard, where documents have labels and shards are clusters or labels."""
    masked: bool = False
    """Whether only some tokens are learnt: answers in conversations, completions after prompts."""
    learnt_tokens: int | None = None
    """Tokens of the training text that are learnt, in a corpus with a loss mask."""
    validation_learnt_tokens: int | None = None
    chat_template: str | None = None
    """The template that wrote the conversations; it goes with a model that was trained on them."""
    version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CorpusMeta":
        fields = json.loads(text)
        labels = {label: tuple(tokens) for label, tokens in fields["label_tokens"].items()}
        return cls(**{**fields, "shard_tokens": tuple(fields["shard_tokens"]), "label_tokens": labels})

    def event(self) -> dict[str, Any]:
        """Return the fields of the event `corpus`."""
        names = ("partition", "documents", "skipped", "shard_tokens", "validation_tokens", "purity", "overall_purity")
        more: dict[str, Any] = {"learnt_tokens": self.learnt_tokens} if self.masked else {}
        if self.partition == "labels":
            more["label_shards"] = {label: tokens.index(max(tokens)) for label, tokens in self.label_tokens.items()}
        return {name: getattr(self, name) for name in names} | more

    @property
    def purity(self) -> dict[str, float]:
        """For each label, the share of its tokens in the shard that has most of them."""
        return {label: max(tokens) / max(1, sum(tokens)) for label, tokens in self.label_tokens.items()}

    @property
    def overall_purity(self) -> float | None:
        """Return the purity of all labelled tokens together; None without labels."""
        total = sum(map(sum, self.label_tokens.values()))
        return sum(map(max, self.label_tokens.values())) / total if total else None


@final
@dataclass(frozen=True)
class Corpus:
    """A prepared corpus on disk: `Corpus.open` opens it, `prepare` of preparation/corpus_cache.py makes it."""

    folder: Path
    meta: CorpusMeta

    @classmethod
    def open(cls, folder: Path, *, allow_missing_shards: bool = False) -> "Corpus":
        """Open the corpus in `folder`; DataError if it is missing, unfinished or does not match its meta.json."""
        try:
            meta = CorpusMeta.from_json((folder / META).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{folder} holds no usable {META}: {error!r}; delete the folder to rebuild it") from error
        if meta.version != FORMAT_VERSION:
            raise DataError(f"{folder} has format {meta.version}, not {FORMAT_VERSION}; delete it to rebuild it")
        corpus = cls(folder, meta)
        for name, expected in corpus.file_sizes().items():
            path = folder / name
            size_bytes = path.stat().st_size if path.is_file() else None
            if size_bytes is None and allow_missing_shards and name not in (TOKENIZER, VALIDATION):
                continue
            if size_bytes != expected:
                state = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
                raise DataError(f"{path} {state}, but {META} says {expected} bytes; delete the folder to rebuild it")
        return corpus

    def has(self, shard: int) -> bool:
        """Whether the shard's file is on this machine (in a swarm some are only on others)."""
        return (self.folder / shard_name(shard)).is_file()

    def file_sizes(self) -> dict[str, int]:
        """Return the expected size in bytes of each file but meta.json."""
        width = self.dtype.itemsize
        sizes = {shard_name(i): width * tokens for i, tokens in enumerate(self.meta.shard_tokens)}
        return {
            TOKENIZER: self.meta.tokenizer_bytes,
            VALIDATION: width * self.meta.validation_tokens,
            **sizes,
        }

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocab_size, masked=self.meta.masked)

    @property
    def mask_bit(self) -> int | None:
        """Set in the tokens that are not learnt; None in a corpus without a loss mask."""
        return mask_bit(self.dtype) if self.meta.masked else None

    @property
    def vocab_size(self) -> int:
        return self.meta.vocab_size

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER

    @property
    def shards(self) -> int:
        return len(self.meta.shard_tokens)

    @property
    def train_tokens(self) -> int:
        return sum(self.meta.shard_tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.meta.train_bytes / max(1, self.train_tokens)

    @property
    def unigram_perplexity(self) -> float:
        return self.meta.unigram_perplexity

    @property
    def digest(self) -> str:
        return self.meta.digest

    def worker_weight(self, shards: Sequence[int]) -> float:
        """Count the training tokens of some shards: the weight of their worker's contribution if shards are not
        i.i.d."""
        return float(sum(self.meta.shard_tokens[shard] for shard in shards))

    def shard(self, shard: int) -> Tokens:
        """Return the tokens of one training shard, mapped from disk."""
        return self._map(shard_name(shard), self.meta.shard_tokens[shard])

    def validation(self) -> Tokens:
        """Return the held-out tokens, mapped from disk."""
        return self._map(VALIDATION, self.meta.validation_tokens)

    def _map(self, name: str, tokens: int) -> Tokens:
        if tokens == 0:
            return np.empty(0, self.dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / name, self.dtype, mode="r", shape=(tokens,))
