"""prepare(): lossless shards, a fixed split, and a cache that is complete or not there at all."""

import logging
import math
import os
import pickle
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus, shard_name, token_dtype
from diloco.data.preparation import corpus_cache
from diloco.data.preparation.builder import unigram_perplexity
from diloco.data.preparation.corpus_cache import cache_root, prepare
from diloco.data.preparation.passages import Passages, cut
from diloco.data.sources.local import StandardLibrary
from diloco.data.sources.registry import open_source
from diloco.data.tokenizer import END_OF_TEXT, Tokenizer
from diloco.errors import DataError


def write_text(folder: Path, files: int = 20, seed: int = 0) -> Path:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgäß ", k=rng.randint(1, 8))) for _ in range(200)]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(rng.randint(5, 60))]
        (folder / f"{i:03}.txt").write_text(f"file {i}\n" + "\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    source = write_text(tmp_path / "text")
    return DataConfig(
        source=str(source),
        vocab_size=400,
        shards=4,
        validation_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
    )


def texts_of(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The training and the validation passages, decoded from the files."""
    tokenizer = Tokenizer.load(corpus.tokenizer_path)

    def passages(tokens: np.ndarray) -> list[str]:  # type: ignore[type-arg]
        ends = np.flatnonzero(tokens == tokenizer.end_of_text)
        parts = np.split(tokens, ends + 1)
        assert len(parts[-1]) == 0, "every passage is closed by an end-of-text"
        return [tokenizer.decode(part[:-1].tolist()) for part in parts[:-1]]

    train = [text for shard in range(corpus.shards) for text in passages(corpus.shard(shard))]
    return train, passages(corpus.validation())


def test_shards_hold_every_passage_exactly_once_and_without_loss(config: DataConfig) -> None:
    train, validation = texts_of(prepare(config))
    expected = list(Passages(open_source(config), config))
    assert sorted(train) == sorted(p.text for p in expected if not p.is_validation)
    assert validation == [p.text for p in expected if p.is_validation]
    assert "".join(p.text for p in expected) == "".join(document.text for document in open_source(config).documents())


def test_counts_in_meta_are_those_of_the_text_and_the_files(config: DataConfig) -> None:
    corpus = prepare(config)
    train, validation = texts_of(corpus)
    assert corpus.meta.documents == 20
    assert corpus.meta.characters == sum(map(len, train)) + sum(map(len, validation))
    assert corpus.meta.train_bytes == sum(len(text.encode()) for text in train)
    assert corpus.meta.validation_bytes == sum(len(text.encode()) for text in validation)
    assert corpus.train_tokens == sum(len(corpus.shard(i)) for i in range(4))
    assert corpus.bytes_per_token == corpus.meta.train_bytes / corpus.train_tokens > 1
    assert corpus.shard(0).dtype == np.uint16
    assert 0.08 < corpus.meta.validation_bytes / (corpus.meta.train_bytes + corpus.meta.validation_bytes) < 0.15


def test_shards_are_balanced_to_within_one_passage_even_if_lengths_alternate(
    config: DataConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "alternating"
    folder.mkdir()
    for i in range(40):  # dealing by turns would give one of two shards all the long ones
        (folder / f"{i:02}.txt").write_text(f"{i} " * (300 if i % 2 else 3))
    corpus = prepare(replace(config, source=str(folder), shards=2))
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    longest = max(len(tokenizer.encode(text)) + 1 for text in texts_of(corpus)[0])
    assert max(corpus.meta.shard_tokens) - min(corpus.meta.shard_tokens) <= longest


def test_split_does_not_depend_on_shards_vocabulary_or_sequence_length(config: DataConfig) -> None:
    reference = texts_of(prepare(config))
    for other in (
        replace(config, shards=7),
        replace(config, vocab_size=300),
        replace(config, sequence_length=9),
    ):
        corpus = prepare(other)
        assert corpus.shards == other.shards
        assert corpus.vocab_size == other.vocab_size
        train, validation = texts_of(corpus)
        assert sorted(train) == sorted(reference[0])
        assert validation == reference[1]


def test_a_larger_validation_fraction_holds_out_more(config: DataConfig) -> None:
    small, large = prepare(config), prepare(replace(config, validation_fraction=0.5))
    assert large.meta.validation_bytes > 2 * small.meta.validation_bytes


def test_no_validation_passage_is_also_in_training_even_if_files_are_copied(config: DataConfig) -> None:
    for path in list(Path(config.source).iterdir()):
        (path.parent / f"copy-{path.name}").write_bytes(path.read_bytes())
    (Path(config.source) / "blank.txt").write_text(" \n\n")
    corpus = prepare(config)
    train, validation = texts_of(corpus)
    assert not set(train) & set(validation)
    assert corpus.meta.skipped == {"duplicate": 20, "empty": 1}


def test_one_big_file_is_dealt_over_all_shards_and_has_a_validation_part(config: DataConfig, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(path.read_text() for path in sorted(Path(config.source).iterdir())))
    corpus = prepare(replace(config, source=str(book)))
    assert min(corpus.meta.shard_tokens) > 0.5 * max(corpus.meta.shard_tokens)
    assert corpus.meta.validation_tokens > 0


@given(document=st.text(alphabet="ab\n", max_size=60), limit=st.integers(1, 20))
def test_cut_loses_nothing_and_respects_limit_and_lines(document: str, limit: int) -> None:
    parts = list(cut(document, limit))
    assert "".join(parts) == document
    assert all(len(part) <= limit for part in parts)
    assert all(part.endswith("\n") or "\n" not in part for part in parts[:-1])


def test_unigram_perplexity_is_that_of_the_files(config: DataConfig) -> None:
    corpus = prepare(config)
    train = np.concatenate([corpus.shard(i) for i in range(4)])
    loss = 0.0
    for token in corpus.validation():
        loss -= math.log((np.count_nonzero(train == token) + 1) / (len(train) + corpus.vocab_size))
    assert math.isclose(corpus.unigram_perplexity, math.exp(loss / len(corpus.validation())), rel_tol=1e-9)


def test_unigram_perplexity_of_even_counts_is_the_vocabulary_size() -> None:
    assert math.isclose(unigram_perplexity(np.full(8, 5), np.arange(8)), 8.0)


def test_preparing_twice_and_elsewhere_gives_the_same_bytes(config: DataConfig, tmp_path: Path) -> None:
    first = prepare(config)
    two = prepare(replace(config, cache_dir=str(tmp_path / "other")))
    assert first.digest == two.digest
    assert first.folder != two.folder
    for path in first.folder.iterdir():
        assert path.read_bytes() == (two.folder / path.name).read_bytes()


def test_digest_tells_different_text_apart(config: DataConfig) -> None:
    before = prepare(config)
    (Path(config.source) / "000.txt").write_text("something else")
    assert prepare(config).digest != before.digest


def test_second_preparation_opens_the_cache_and_builds_nothing(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[tuple[str, int, int | None]] = []
    first = prepare(config, lambda *report: stages.append(report))
    assert {stage for stage, _, _ in stages} == {"training the tokenizer", "tokenising", "counting tokens"}
    assert all(total is not None and 0 <= done <= total for _, done, total in stages)
    reported = [(done, total) for stage, done, total in stages if stage == "tokenising"]
    assert reported[-1][0] == reported[-1][1]
    monkeypatch.setattr(corpus_cache, "_run_preparation", lambda *_: pytest.fail("built again"))
    assert prepare(replace(config, sequence_length=64)) == first


def test_preparations_that_nobody_came_back_to_are_removed_after_days(config: DataConfig) -> None:
    leftovers = [cache_root(config) / f".{name}.preparing" for name in ("old", "recent")]
    for leftover in leftovers:
        leftover.mkdir(parents=True)
        (leftover / "validation.bin").write_bytes(b"12")
    long_ago = time.time() - corpus_cache.ABANDONED_AFTER_SECONDS - 60
    for path in [*leftovers[0].iterdir(), leftovers[0]]:
        os.utime(path, (long_ago, long_ago))
    prepare(config)
    assert [leftover.exists() for leftover in leftovers] == [False, True]


@pytest.mark.parametrize("victim", ["train-00001.bin", "validation.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_damaged_cache_is_rebuilt_with_a_warning_and_never_used(
    config: DataConfig, victim: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = prepare(config)
    path = good.folder / victim
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-2])
    else:
        path.unlink()
    with pytest.raises(DataError, match=victim.replace(".", r"\.")):
        Corpus.open(good.folder)
    with caplog.at_level(logging.WARNING):
        assert prepare(config) == good
    assert "damaged and will be rebuilt" in caplog.text
    assert path.read_bytes() == content
    assert list(cache_root(config).iterdir()) == [good.folder]


def test_two_preparations_at_once_both_get_a_valid_corpus(config: DataConfig) -> None:
    with ThreadPoolExecutor(4) as pool:
        corpora = list(pool.map(prepare, [config] * 4))
    assert len({corpus.digest for corpus in corpora}) == 1
    assert list(cache_root(config).iterdir()) == [corpora[0].folder]
    assert texts_of(corpora[0])[1]


def test_given_tokenizer_is_used_and_its_content_is_part_of_the_cache_key(config: DataConfig, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer.train(["abc abc"], 258).to_json(), encoding="utf-8")
    given_one = replace(config, tokenizer=str(path), vocab_size=2048)
    corpus = prepare(given_one)
    assert corpus.vocab_size == 258
    assert Tokenizer.load(corpus.tokenizer_path).to_json() == path.read_text(encoding="utf-8")
    path.write_text(Tokenizer.train(["xyz xyz"], 258).to_json(), encoding="utf-8")
    assert prepare(given_one).folder != corpus.folder


def test_large_vocabularies_get_wider_tokens() -> None:
    assert token_dtype(2**16) == np.dtype("<u2")
    assert token_dtype(2**16 + 1) == np.dtype("<u4")


def test_vocabulary_that_the_text_does_not_support_is_said(
    config: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = prepare(replace(config, vocab_size=50_000))
    assert 400 < corpus.vocab_size < 50_000
    assert f"supports a vocabulary of {corpus.vocab_size} tokens, not the 50000" in caplog.text


def test_skipped_files_are_said_and_counted(config: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    (Path(config.source) / "bad.txt").write_bytes(b"\xff")
    assert prepare(replace(config, on_bad_row="skip")).meta.skipped == {"unreadable files": 1}
    assert "1 unreadable files" in caplog.text


def test_text_with_the_special_token_in_it_does_not_split_a_passage(config: DataConfig) -> None:
    (Path(config.source) / "000.txt").write_text(f"before {END_OF_TEXT} after")
    train, validation = texts_of(prepare(config))
    assert f"before {END_OF_TEXT} after" in train + validation


@pytest.mark.parametrize("content", [b"", b"  \n", b"one short document", b"caf\xe9"])
def test_source_without_enough_usable_text_is_refused_and_leaves_no_cache(
    config: DataConfig, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "small.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"small\.txt.*(too little|not UTF-8)"):
        prepare(replace(config, source=str(path)))
    assert list(cache_root(config).iterdir()) == []


def test_unusable_cache_folder_is_refused_with_the_remedy(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file.*--data\.cache_dir"):
        prepare(replace(config, cache_dir=str(tmp_path / "file" / "below")))


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(DataConfig()) == tmp_path / "diloco"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root(DataConfig()) == Path.home() / ".cache" / "diloco"
    assert cache_root(DataConfig(cache_dir="here")) == Path("here")


def test_corpus_travels_to_another_process_by_pickle(config: DataConfig) -> None:
    corpus = prepare(config)
    assert pickle.loads(pickle.dumps(corpus)) == corpus
    assert (corpus.folder / shard_name(0)).stat().st_mode & 0o777 == (
        Path(config.source) / "000.txt"
    ).stat().st_mode & 0o777


def test_a_part_of_the_stdlib_is_prepared_end_to_end(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    part = StandardLibrary(Path(os.__file__).parent / "json")
    monkeypatch.setattr(corpus_cache, "open_source", lambda _spec: part)
    train, validation = texts_of(prepare(replace(config, source="stdlib")))
    assert any("JSONDecodeError" in text for text in train + validation)


def test_data_modules_import_neither_torch_nor_tokenizers() -> None:
    program = (
        "import sys, diloco.data.config, diloco.data.order, diloco.data.tokenizer;"
        "import diloco.data.preparation.corpus_cache;"
        "print([m for m in ('torch', 'tokenizers', 'rich') if m in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"
