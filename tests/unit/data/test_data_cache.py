"""`diloco data list` and `clear`: what is in the cache, and no deletion of what a run uses."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.cli.main import run
from diloco.data.config import DataConfig
from diloco.data.corpus import META, Corpus
from diloco.data.preparation import corpus_cache
from diloco.data.preparation.corpus_cache import lock_corpus, prepare


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Two corpora, and a folder of the user's own; this process uses none of them."""
    for name in ("law", "sea"):
        (tmp_path / f"{name}.txt").write_text(f"a text about the {name} " * 3000)
        prepare(
            DataConfig(source=str(tmp_path / f"{name}.txt"), vocab_size=280, shards=2, cache_dir=str(tmp_path / "c"))
        )
    (tmp_path / "c" / "my-photos").mkdir()
    (tmp_path / "c" / "my-photos" / "a.png").write_bytes(b"1")
    release()
    yield tmp_path / "c"
    release()


def release() -> None:
    """As at the end of a process."""
    for file in corpus_cache._held.values():
        os.close(file)
    corpus_cache._held.clear()


def diloco(*arguments: str, cache: Path) -> int:
    return run(["data", *arguments, "--data.cache_dir", str(cache)])


def names(cache: Path) -> dict[str, str]:
    return {corpus.name.partition("-")[0]: corpus.name for corpus in corpus_cache.list_corpora(cache)}


def test_list_shows_sizes_age_and_state(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    law = cache / names(cache)["law"]
    os.utime(law / META, (time.time() - 3 * 86_400 - 60,) * 2)
    assert diloco("list", cache=cache) == 0
    shown = capsys.readouterr().out
    corpus = Corpus.open(law)
    assert f"{corpus.train_tokens + corpus.meta.validation_tokens:,}" in shown
    assert all(f"{name} " in shown for name in names(cache).values())  # whole, to paste, in 40 columns too
    assert "3 days ago" in shown and "just now" in shown and "2 in " in shown and "my-photos" not in shown
    assert diloco("list", cache=cache / "nowhere") == 0
    assert "no prepared corpora" in capsys.readouterr().out


def test_clear_deletes_by_name_or_all_and_nothing_else(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpora = names(cache)
    assert diloco("clear", corpora["law"], "--yes", cache=cache) == 0
    assert not (cache / corpora["law"]).exists() and (cache / corpora["sea"]).exists()
    assert f"deleted: {corpora['law']}" in capsys.readouterr().out
    assert diloco("clear", "--all", "--yes", cache=cache) == 0
    assert names(cache) == {} and (cache / "my-photos" / "a.png").exists()


def test_what_a_process_uses_is_kept_and_said(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpora = names(cache)
    code = (
        "import sys\nfrom diloco.data.config import DataConfig\n"
        "from diloco.data.preparation.corpus_cache import prepare\n"
        f"source, cache = {str(tmp_path / 'law.txt')!r}, {str(cache)!r}\n"
        "prepare(DataConfig(source=source, vocab_size=280, shards=2, cache_dir=cache))\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        assert diloco("list", cache=cache) == 0
        assert "in use" in capsys.readouterr().out
        assert diloco("clear", corpora["law"], "--yes", cache=cache) == 2
        assert diloco("clear", "--all", "--yes", cache=cache) == 0
        assert f"kept: {corpora['law']} (in use)" in capsys.readouterr().out
        assert names(cache) == {"law": corpora["law"]}
        process.stdin.close()
    assert diloco("clear", "--all", "--yes", cache=cache) == 0
    assert names(cache) == {}


def test_a_corpus_that_a_run_takes_while_it_is_cleared_is_kept(cache: Path) -> None:
    (law,) = [corpus for corpus in corpus_cache.list_corpora(cache) if corpus.name.startswith("law")]
    assert law.is_free and corpus_cache.hold(law.folder)
    with pytest.raises(Exception, match="is in use"):
        corpus_cache.delete_corpus(law)
    assert Corpus.open(law.folder)


def test_an_interrupted_preparation_is_listed_and_one_at_work_is_kept(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    working = cache / ".air-0123456789abcdef.preparing"
    working.mkdir()
    (working / "state.json").write_text("{}")
    with lock_corpus(cache / "air-0123456789abcdef") as free:
        assert free
        assert diloco("clear", "--all", "--yes", cache=cache) == 0
        assert "kept: air-0123456789abcdef (being prepared)" in capsys.readouterr().out and working.exists()
    assert [corpus.state for corpus in corpus_cache.list_corpora(cache)] == ["interrupted"]
    assert diloco("clear", "air-0123456789abcdef", "--yes", cache=cache) == 0
    assert not working.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give names of `diloco data list`, or --all"),
        (["law-0", "--all"], "give names of `diloco data list`, or --all"),
        (["law-0"], "there is no corpus 'law-0'"),
        (["--all"], "no terminal to ask at: add --yes"),
    ],
)
def test_clear_refuses_what_it_does_not_understand_and_asks_before_it_deletes(
    cache: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diloco("clear", *arguments, cache=cache) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and len(names(cache)) == 2
