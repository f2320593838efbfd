"""Builds the files of a corpus from a source; a kill loses at most the work since the last commit.

    state.json           the last commit; replaced atomically, after everything it describes is on the disk
    digests.bin          digests of the documents seen so far, to recognise copies after an interruption
    clusters.npz, labels.json   the cluster centres, or the shard of each label, if shards are not i.i.d.
    tokenizer.json, train-*.bin, validation.bin   the files of the corpus
    meta.json            written last: the corpus is then complete

Commits lie between batches of passages, and batches do not depend on where a walk begins; so the files are the same,
byte for byte, however often the work was interrupted. Counts and digest are computed from the finished files.
"""

import hashlib
import json
import logging
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from diloco.atomic_files import PARTIAL, append_file, write_file
from diloco.data.config import DataConfig
from diloco.data.corpus import META, TOKENIZER, VALIDATION, CorpusMeta, corpus_digest, mask_bit, shard_name, token_dtype
from diloco.data.preparation.partitions import (
    CLUSTERS_FILE,
    LABELS_FILE,
    MAX_LABELS,
    LoadFeatures,
    Partition,
    ReportProgress,
    open_partition,
)
from diloco.data.preparation.passages import DIGEST_BYTES, Passage, Passages, Walk
from diloco.data.sources.base import Source, Spans
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError

logger = logging.getLogger(__name__)

TOKENIZER_SAMPLE_BYTES = 4 << 20
"""The BPE is trained on this much text, spread evenly: twice as much gives < 1 % more bytes per token."""

ENCODE_BATCH_BYTES = 1 << 20
COMMIT_SECONDS = 5.0
COMMIT_BYTES = 64 << 20

STATE = "state.json"
DIGESTS = "digests.bin"
WORKING_FILES = (STATE, DIGESTS, CLUSTERS_FILE, LABELS_FILE)
"""Removed from a finished corpus."""


@dataclass
class PreparationState:
    """The content of state.json."""

    fingerprint: str
    walk: Walk = field(default_factory=Walk)
    tokens: dict[str, int] = field(default_factory=dict)
    digests: int = 0
    label_tokens: dict[str, list[int]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        write_file(folder / STATE, json.dumps(asdict(self)), durable=True)

    @classmethod
    def load(cls, folder: Path) -> "PreparationState":
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return cls(**{**content, "walk": Walk(**content["walk"])})


@final
class Preparation:
    """The preparation of one corpus, in a folder to which no other process writes."""

    def __init__(
        self,
        config: DataConfig,
        source: Source,
        folder: Path,
        progress: ReportProgress,
        load_features: LoadFeatures | None,
    ) -> None:
        self.config = config
        self.source = source
        self.folder = folder
        self._progress = progress
        self._load_features = load_features

    def run(self) -> None:
        """Write all files of the corpus, continuing from the last commit of an earlier attempt."""
        if (self.folder / META).exists():
            self._remove_working_files()
            return
        self.state = self._load_state() or self._new_state()
        self.tokenizer = self._obtain_tokenizer()
        self.writer = self._open_writer()
        self._write(self._partition())
        self._finish()
        self._remove_working_files()

    def _remove_working_files(self) -> None:
        for name in WORKING_FILES:
            (self.folder / name).unlink(missing_ok=True)
        for left_by_a_kill in self.folder.glob(f".*{PARTIAL}"):
            left_by_a_kill.unlink()

    # The starting point

    def _load_state(self) -> PreparationState | None:
        if not (self.folder / STATE).exists():
            return None
        try:
            state = PreparationState.load(self.folder)
            sizes = state.digests * DIGEST_BYTES
            if state.digests and (self.folder / DIGESTS).stat().st_size < sizes:
                raise ValueError(f"{DIGESTS} is too short")
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("the interrupted preparation cannot be continued (%s): starting again", error)
            return None
        if state.fingerprint != self.source.fingerprint():
            logger.warning("data.source %r has changed since its preparation was interrupted: starting again",
                           self.config.source)  # fmt: skip
            return None
        return state

    def _new_state(self) -> PreparationState:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        state = PreparationState(self.source.fingerprint())
        state.save(self.folder)
        return state

    # Tokenizer, writer and partition

    def _obtain_tokenizer(self) -> Tokenizer:
        path = self.folder / TOKENIZER
        if path.exists():
            return Tokenizer.load(path)
        if self.config.tokenizer is not None:
            tokenizer = Tokenizer.load(self.config.tokenizer)
        else:
            self._progress("training the tokenizer", 0, 1)
            tokenizer = train_tokenizer(self.config, self.source)
            self._progress("training the tokenizer", 1, 1)
        tokenizer.save(path)
        return tokenizer

    def _open_writer(self) -> "ShardWriter":
        masked = self.config.learns_answers_only
        try:
            return ShardWriter(self.folder, self.config.shards, self.tokenizer, self.state.tokens, masked=masked)
        except ValueError as error:
            logger.warning("the interrupted preparation is damaged (%s): starting again", error)
            self.state = self._new_state()
            self.tokenizer = self._obtain_tokenizer()
            return ShardWriter(self.folder, self.config.shards, self.tokenizer, {}, masked=masked)

    def _partition(self) -> Partition:
        return open_partition(
            self.config,
            self.source,
            self.folder,
            self.writer.shard_tokens,
            self.state.label_tokens,
            self._progress,
            self._load_features,
        )

    # Tokenising

    def _write(self, partition: Partition) -> None:
        passages = Passages(self.source, self.config, self.state.walk)
        passages.seen = self._load_digests()
        last = time.monotonic()
        for batch in batches(passages):
            for passage, shard, tokens in self.writer.write(batch, partition):
                self._count_label(passage, shard, tokens)
            done, total = passages.progress()
            self._progress("tokenising", done if total is None else min(done, total), total)
            if time.monotonic() - last >= COMMIT_SECONDS or self.writer.pending_bytes >= COMMIT_BYTES:
                self._commit(passages)
                last = time.monotonic()
        self._commit(passages)
        done, total = passages.progress()
        self._progress("tokenising", total or done, total or done)

    def _load_digests(self) -> set[bytes]:
        path = self.folder / DIGESTS
        content = path.read_bytes()[: self.state.digests * DIGEST_BYTES] if path.exists() else b""
        write_file(path, content, durable=True)
        return {content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES)}

    def _commit(self, passages: Passages) -> None:
        """Write the files first, then the state that describes them."""
        self.writer.commit()
        append_file(self.folder / DIGESTS, b"".join(passages.new_digests))
        self.state.digests += len(passages.new_digests)
        passages.new_digests.clear()
        self.state.tokens = dict(self.writer.tokens)
        self.state.save(self.folder)

    def _count_label(self, passage: Passage, shard: int, tokens: int) -> None:
        # With i.i.d. shards labels are counted only if data.label_field asks for it.
        if passage.label is None or (self.config.partition == "iid" and self.config.label_field is None):
            return
        counts = self.state.label_tokens
        if passage.label not in counts:
            if len(counts) == MAX_LABELS:
                raise DataError(
                    f"the documents of data.source {self.config.source!r} have more than {MAX_LABELS} different "
                    f"labels (data.label_field {self.config.label_field!r}): choose a field that names domains"
                )
            counts[passage.label] = [0] * self.config.shards
        counts[passage.label][shard] += tokens

    # Counts and metadata

    def _finish(self) -> None:
        walk = self.state.walk
        skipped = self._check_split(walk)
        counts, digest, files = self._count_and_hash()
        tokenizer_bytes = (self.folder / TOKENIZER).stat().st_size
        meta = CorpusMeta(
            vocab_size=self.tokenizer.vocab_size,
            end_of_text=self.tokenizer.end_of_text,
            shard_tokens=tuple(self.writer.shard_tokens),
            validation_tokens=self.writer.validation_tokens,
            documents=walk.documents,
            characters=walk.characters,
            train_bytes=walk.train_bytes,
            validation_bytes=walk.validation_bytes,
            unigram_perplexity=unigram_perplexity(counts["train"], counts["validation"]),
            tokenizer_bytes=tokenizer_bytes,
            digest=digest,
            files=files,
            skipped=skipped,
            partition=self.config.partition,
            label_tokens={label: tuple(tokens) for label, tokens in self.state.label_tokens.items()},
            chat_template=self.source.chat_template,
            **self._mask_fields(counts),
        )
        write_file(self.folder / META, meta.to_json(), durable=True)

    def _mask_fields(self, counts: dict[str, NDArray[np.int64]]) -> dict[str, Any]:
        if not self.config.learns_answers_only:
            return {}
        return {
            "masked": True,
            "learnt_tokens": int(counts["train"].sum()),
            "validation_learnt_tokens": int(counts["validation"].sum()),
        }

    def _check_split(self, walk: Walk) -> dict[str, int]:
        """Refuse a corpus without a training and a validation part; log and return the counts of what was skipped."""
        skipped = {**self.source.skipped, **walk.left_out}
        counts = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
        first = "" if walk.first_problem is None else f". The first that cannot be used: {walk.first_problem}"
        if not walk.documents and walk.first_problem is not None:
            raise DataError(f"nothing in data.source {self.config.source!r} can be read ({counts}){first}")
        if not walk.validation_bytes:
            documents = "1 document" if walk.documents == 1 else f"{walk.documents} documents"
            raise DataError(
                f"data.source {self.config.source!r} has {walk.train_bytes} bytes of text in {documents}: too "
                f"little for a training and a validation part; give more text"
                + (f" (left out: {counts}){first}" if counts else "")
            )
        if self.source.skipped or walk.first_problem is not None:
            logger.warning("data.source %r: left out: %s%s", self.config.source, counts, first)
        return skipped

    def _count_and_hash(self) -> tuple[dict[str, NDArray[np.int64]], str, dict[str, str]]:
        """Read the finished files: how often each token is learnt, the digest of the corpus, and that of each file."""
        size = self.tokenizer.vocab_size
        counts = {"train": np.zeros(size, np.int64), "validation": np.zeros(size, np.int64)}
        masked = self.config.learns_answers_only
        dtype = token_dtype(size, masked=masked)
        files = {}
        for number, name in enumerate(self.writer.names):
            self._progress("counting tokens", number, len(self.writer.names))
            file_hash = hashlib.sha256()
            with (self.folder / name).open("rb") as file:
                while content := file.read(1 << 24):
                    file_hash.update(content)
                    kind = "validation" if name == VALIDATION else "train"
                    tokens = np.frombuffer(content, dtype)
                    learnt = tokens[tokens & mask_bit(dtype) == 0] if masked else tokens
                    counts[kind] += np.bincount(learnt, minlength=size)
            files[name] = file_hash.hexdigest()
        tokenizer = (self.folder / TOKENIZER).read_bytes()
        digest = corpus_digest(tokenizer, files, masked=masked, chat_template=self.source.chat_template)
        return counts, digest, files


# The files of the shards


@final
class ShardWriter:
    """Encodes passages and appends them to the files of their shards, from one commit to the next.

    Tokens added since the last commit are in memory; `commit` appends them to the files and flushes the disk. A
    preparation that was killed leaves files at least as long as at its last commit; the next writer truncates them and
    continues.
    """

    def __init__(
        self, folder: Path, shards: int, tokenizer: Tokenizer, tokens: Mapping[str, int], *, masked: bool = False
    ) -> None:
        """`tokens`: the tokens of each file at the last commit. Raises ValueError if a file is shorter.

        `masked`: passages say which of their characters are learnt.
        """
        self._folder = folder
        self._tokenizer = tokenizer
        self._masked = masked
        self._dtype = token_dtype(tokenizer.vocab_size, masked=masked)
        self.names = [VALIDATION, *(shard_name(shard) for shard in range(shards))]
        self.tokens = {name: tokens.get(name, 0) for name in self.names}
        self.pending_bytes = 0
        self._pending: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._truncate()

    def _truncate(self) -> None:
        for name, tokens in self.tokens.items():
            with (self._folder / name).open("ab") as file:
                expected = tokens * self._dtype.itemsize
                if file.tell() < expected:
                    raise ValueError(f"{name} has {file.tell()} bytes, less than the {expected} that were written")
                file.truncate(expected)

    @property
    def shard_tokens(self) -> list[int]:
        return [self.tokens[name] for name in self.names[1:]]

    @property
    def validation_tokens(self) -> int:
        return self.tokens[VALIDATION]

    def write(self, passages: Sequence[Passage], partition: Partition) -> list[tuple[Passage, int, int]]:
        """Encode passages for the next commit; returns (passage, shard, number of tokens) of the training passages."""
        pieces = self._encode(passages)
        training = [i for i, passage in enumerate(passages) if not passage.is_validation]
        shards = partition.assign([(passages[i], len(pieces[i])) for i in training])
        names = dict(zip(training, map(shard_name, shards), strict=True))
        for i, piece in enumerate(pieces):
            name = names.get(i, VALIDATION)
            self._pending[name].append(piece)
            self.tokens[name] += len(piece)
            self.pending_bytes += piece.nbytes
        return [(passages[i], shard, len(pieces[i])) for i, shard in zip(training, shards, strict=True)]

    def _encode(self, passages: Sequence[Passage]) -> list[NDArray[Any]]:
        """Return the tokens of each passage, with the end-of-text token that follows it."""
        end = self._tokenizer.end_of_text
        if not self._masked and not any(passage.is_chat for passage in passages):
            encoded = self._tokenizer.encode_batch([passage.text for passage in passages])
            return [np.array([*tokens, end], self._dtype) for tokens in encoded]
        pieces: list[NDArray[Any]] = [np.empty(0)] * len(passages)
        for is_chat in (False, True):
            indices_of_kind = [index for index, passage in enumerate(passages) if passage.is_chat == is_chat]
            encoded_chats = self._tokenizer.encode_chats([passages[i].text for i in indices_of_kind], special=is_chat)
            for index, (tokens, spans) in zip(indices_of_kind, encoded_chats, strict=True):
                pieces[index] = self._masked_piece(passages[index], tokens, spans)
        return pieces

    def _masked_piece(self, passage: Passage, tokens: list[int], spans: Sequence[tuple[int, int]]) -> NDArray[Any]:
        end = self._tokenizer.end_of_text
        learnt = _learnt(spans, passage.answers, len(passage.text))
        if not passage.is_chat or tokens[-1:] != [end]:  # a template may write it
            tokens = [*tokens, end]
            learnt = [*learnt, not passage.is_chat or passage.answers is None]
        piece = np.array(tokens, self._dtype)
        if self._masked:
            piece[~np.array(learnt, bool)] |= mask_bit(self._dtype)
        return piece

    def commit(self) -> None:
        """Append the pending tokens to the files, and flush."""
        for name, pieces in self._pending.items():
            append_file(self._folder / name, np.concatenate(pieces).tobytes())
        self._pending.clear()
        self.pending_bytes = 0


def _learnt(tokens: Sequence[tuple[int, int]], answers: Spans | None, length: int) -> list[bool]:
    """Say which tokens have a character of an answer; `tokens`: their characters in a text of `length` characters."""
    if answers is None:
        return [True] * len(tokens)
    inside = np.zeros(length + 1, np.int64)  # [i]: characters of answers before character i
    for begin, end in answers:
        inside[begin + 1 : end + 1] = 1
    inside = np.cumsum(inside)
    return [bool(inside[end] > inside[begin]) for begin, end in tokens]


# The tokenizer


def train_tokenizer(config: DataConfig, source: Source) -> Tokenizer:
    """Train a BPE on the training passages of a source."""
    passages = Passages(source, config)
    tokenizer = Tokenizer.train(_tokenizer_sample(passages), config.vocab_size)
    if tokenizer.vocab_size < config.vocab_size and passages.walk.train_bytes:
        logger.warning(
            "data.source %r supports a vocabulary of %d tokens, not the %d asked for (data.vocab_size)",
            config.source, tokenizer.vocab_size, config.vocab_size,
        )  # fmt: skip
    return tokenizer


def _tokenizer_sample(passages: Passages) -> Iterator[str]:
    """Yield training passages of about TOKENIZER_SAMPLE_BYTES in all, spread evenly over a source of known size."""
    source_bytes = passages.size_bytes
    share = 1.0 if source_bytes is None else min(1.0, TOKENIZER_SAMPLE_BYTES / max(1, source_bytes))
    sampled_bytes = 0
    for passage in passages:
        if passage.is_validation:
            continue
        if sampled_bytes <= share * passages.walk.train_bytes:
            sampled_bytes += passage.size_bytes
            yield passage.text
        if source_bytes is None and sampled_bytes >= TOKENIZER_SAMPLE_BYTES:
            return  # a stream may have no end


# Passages in groups, and their counts


def batches(passages: Passages) -> Iterator[list[Passage]]:
    """Yield groups of passages, large enough to keep all cores busy tokenising."""
    batch: list[Passage] = []
    size = 0
    for passage in passages:
        batch.append(passage)
        size += passage.size_bytes
        if size >= ENCODE_BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def unigram_perplexity(train_counts: NDArray[np.int64], validation_counts: NDArray[np.int64]) -> float:
    """Compute the perplexity of the validation tokens under the training frequencies with add-one smoothing."""
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    return math.exp(-float(validation_counts @ np.log(probabilities)) / float(validation_counts.sum()))
