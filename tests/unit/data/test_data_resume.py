"""An interrupted preparation goes on from its last durable point and ends with the same bytes."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation import builder
from diloco.data.preparation.corpus_cache import cache_root, prepare
from diloco.data.sources.local import LocalFiles
from diloco.errors import DataError, SourceUnavailable

PROGRAM = """
import json, sys
from diloco.data.preparation import builder
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
builder.COMMIT_SECONDS, builder.ENCODE_BATCH_BYTES = 0.0, 3000
prepare(DataConfig(**json.loads(sys.argv[1])))
"""


class Killed(BaseException):
    """Like SIGKILL: nothing catches it."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Files of several kinds with copies and blanks in them, and a document of many passages; small batches."""
    monkeypatch.setattr(builder, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(builder, "ENCODE_BATCH_BYTES", 3000)
    rng = random.Random(0)
    folder = tmp_path / "text"
    folder.mkdir()
    words = ["".join(rng.choices("abcdefg", k=rng.randint(1, 7))) for _ in range(99)]
    lines = [" ".join(rng.choices(words, k=rng.randint(5, 80))) for _ in range(60)]
    rows = [{"text": text} for text in [*lines, *lines[:5], "", *lines[-3:], "the end"]]
    broken = ['{"text": "cut', '{"body": 1}']
    good = [json.dumps(row) for row in rows]
    (folder / "a.jsonl").write_text("\n".join([*good[:40], *broken, *good[40:], *broken]))
    (folder / "b.txt").write_text("\n".join(rng.choices(lines, k=120)))
    (folder / "c.txt").write_bytes(b"\xff")
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": f"{text} again"}) + "\n" for text in lines))
    return DataConfig(
        source=str(folder), on_bad_row="skip", vocab_size=300, shards=3, cache_dir=str(tmp_path / "cache")
    )


def contents(corpus: Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.folder.iterdir()}


def uninterrupted(config: DataConfig, tmp_path: Path) -> Corpus:
    return prepare(replace(config, cache_dir=str(tmp_path / "uninterrupted")))


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """At the numbered step that makes something durable: a sync, a rename, or the removal of a file."""
    calls = 0

    def counted(real: object) -> object:
        def step(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return real(*arguments, **options)  # type: ignore[operator]

        return step

    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "rename"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def test_killed_at_every_single_step_the_next_one_goes_on_to_the_same_bytes(config: DataConfig, tmp_path: Path) -> None:
    """Each attempt dies one step later than the one before, so that every step is a last one, and none is final."""
    expected = uninterrupted(config, tmp_path)
    assert len(expected.meta.shard_tokens) == 3 and expected.meta.skipped["duplicate"] == 8
    assert expected.meta.skipped["unreadable rows"] == 4 and expected.meta.skipped["unreadable files"] == 1
    number, corpus = 0, None
    while corpus is None:
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, number)
            try:
                corpus = prepare(config)
            except Killed:
                continue
    assert number > 12
    assert contents(corpus) == contents(expected)
    assert corpus.digest == expected.digest
    assert list(cache_root(config).iterdir()) == [corpus.folder]


@pytest.mark.parametrize("number", [8, 40, 100])
def test_killed_once_and_taken_up_again_it_reads_no_document_twice(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    expected = uninterrupted(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, number)
        with pytest.raises(Killed):
            prepare(config)
    (working,) = cache_root(config).glob(".*.preparing")
    taken = (
        json.loads((working / "state.json").read_text())["walk"]["taken"] if (working / "state.json").exists() else 0
    )
    starts = []
    real = LocalFiles.documents

    def documents(self: LocalFiles, start: int = 0) -> Iterator[object]:
        starts.append(start)
        return real(self, start)

    monkeypatch.setattr(LocalFiles, "documents", documents)
    corpus = prepare(config)
    assert contents(corpus) == contents(expected)
    assert starts[-1] == taken
    assert taken > 0 or number < 40


def test_what_was_written_after_the_last_durable_point_is_cut_off(config: DataConfig, tmp_path: Path) -> None:
    expected = uninterrupted(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 60)
        with pytest.raises(Killed):
            prepare(config)
    (working,) = cache_root(config).glob(".*.preparing")
    for path in (*working.glob("*.bin"), working / "digests.bin"):
        with path.open("ab") as file:
            file.write(b"half a commit")
    assert contents(prepare(config)) == contents(expected)


@pytest.mark.parametrize("damage", ["shard", "digests", "state"])
def test_a_damaged_interrupted_preparation_starts_anew_and_says_so(
    config: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    expected = uninterrupted(config, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 90)
        with pytest.raises(Killed):
            prepare(config)
    (working,) = cache_root(config).glob(".*.preparing")
    name = {"shard": "train-00001.bin", "digests": "digests.bin", "state": "state.json"}[damage]
    content = (working / name).read_bytes()
    assert len(content) > 20
    (working / name).write_bytes(content[:10])
    with caplog.at_level(logging.WARNING):
        assert contents(prepare(config)) == contents(expected)
    assert "starting again" in caplog.text


def test_a_source_that_changed_meanwhile_is_prepared_from_its_beginning(config: DataConfig, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 60)
        with pytest.raises(Killed):
            prepare(config)
    with (Path(config.source) / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert contents(prepare(config)) == contents(uninterrupted(config, tmp_path))


def test_a_changed_revision_of_an_unreachable_source_starts_anew(
    config: DataConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFiles, "fingerprint", lambda _self: "one")
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 60)
        with pytest.raises(Killed):
            prepare(config)
    monkeypatch.setattr(LocalFiles, "fingerprint", lambda _self: "two")
    with caplog.at_level(logging.WARNING):
        prepare(config)
    assert "has changed since its preparation was interrupted" in caplog.text


@pytest.mark.parametrize(("error", "kept"), [(SourceUnavailable("no network"), True), (DataError("broken row"), False)])
def test_what_was_prepared_is_kept_if_the_source_may_answer_later(
    config: DataConfig, tmp_path: Path, error: DataError, kept: bool
) -> None:
    expected = uninterrupted(config, tmp_path)
    real = LocalFiles.documents

    def failing(self: LocalFiles, start: int = 0) -> Iterator[object]:
        for number, document in enumerate(real(self, start)):
            if number == 50:
                raise error
            yield document

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFiles, "documents", failing)
        patch.setattr(builder, "train_tokenizer", lambda *_: builder.Tokenizer.load(expected.tokenizer_path))
        with pytest.raises(DataError, match=str(error)):
            prepare(config)
    assert bool(list(cache_root(config).iterdir())) is kept
    assert contents(prepare(config)) == contents(expected)


def test_bounds_hold_across_an_interruption(config: DataConfig, tmp_path: Path) -> None:
    for bounds in ({"max_documents": 30}, {"max_bytes": 9000}, {"max_documents": 71, "max_bytes": 60_000}):
        bounded = replace(config, **bounds)  # type: ignore[arg-type]
        expected = uninterrupted(bounded, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, 25)
            with pytest.raises(Killed):
                prepare(bounded)
        assert contents(prepare(bounded)) == contents(expected)
        meta = expected.meta
        assert meta.train_bytes + meta.validation_bytes <= bounds.get("max_bytes", 1 << 60)
        assert meta.documents <= bounds.get("max_documents", 1 << 60)
        if bounds == {"max_bytes": 9000}:
            assert meta.train_bytes + meta.validation_bytes == 9000  # the last document is cut
        if bounds == {"max_documents": 30}:
            assert meta.documents == 30


@pytest.mark.slow
def test_sigkill_at_random_moments_gives_the_bytes_of_an_uninterrupted_preparation(
    config: DataConfig, tmp_path: Path
) -> None:
    expected = uninterrupted(config, tmp_path)
    arguments = {"source": config.source, "on_bad_row": "skip", "vocab_size": 300, "shards": 3}
    arguments["cache_dir"] = config.cache_dir
    rng = random.Random(1)
    code, kills = None, 0
    while code != 0:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(arguments)])
        limit = time.monotonic() + 60
        while not list(cache_root(config).glob(".*.preparing")) and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.01)
        if kills < 8:
            time.sleep(rng.uniform(0, 0.12))
            process.send_signal(signal.SIGKILL)
        code = process.wait(60)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
    assert kills > 0
    corpus = prepare(config)
    assert contents(corpus) == contents(expected)
    assert [path for path in cache_root(config).iterdir() if path.suffix != ".lock"] == [corpus.folder]
