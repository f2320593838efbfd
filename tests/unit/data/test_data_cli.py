"""`diloco data`: what it prepares is what a run uses; options without effect are refused; help fits a screen."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli.data import Preparing, shard_table
from diloco.cli.main import run
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus, CorpusMeta
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    rows = [{"body": f"document {i} of some words " * (1 + i % 5)} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        '[data]\nsource = "rows.jsonl"\ntext_field = "body"\nshards = 3\nvocab_size = 300\n[outer]\nlr = 0.5\n'
    )
    return tmp_path


def test_prepare_merges_file_and_options_and_says_what_the_corpus_holds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "prepare", "run.toml", "--data.shards", "2", "--data.max_documents=50"]) == 0
    shown = capsys.readouterr().out
    corpus = prepare(
        DataConfig(source="rows.jsonl", text_field="body", vocab_size=300, shards=2, max_documents=50),
        lambda *_: pytest.fail("a run with the same options prepares nothing"),
    )
    assert corpus.meta.documents == 50
    for expected in (
        "documents           50",
        f"{corpus.train_tokens:,} (",
        f"{corpus.bytes_per_token:.2f} bytes a token",
        "2 (iid) of",
        f"{corpus.unigram_perplexity:.1f}",
    ):
        assert expected in shown
    assert str(corpus.folder) in "".join(shown.split())  # a long path is broken into lines
    assert "training the tokenizer" in shown and "tokenising" in shown  # plain lines: this is no terminal


def test_prepare_says_what_is_learnt_of_conversations_and_what_was_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]}
            for i in range(60)]  # fmt: skip
    rows[7]["messages"].pop()
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--data.source", "chat.jsonl", "--data.format", "chat", "--data.chat_template", "chatml"]
    options += ["--data.vocab_size", "300", "--data.shards", "2"]
    assert run(["data", "prepare", *options]) == 2
    assert "chat.jsonl, line 8 has no message of the assistant" in " ".join(capsys.readouterr().err.split())
    assert run(["data", "prepare", *options, "--data.on_bad_row", "skip"]) == 0
    shown = capsys.readouterr().out
    assert "learnt tokens" in shown and "(answers only)" in shown and "1 unreadable rows" in shown
    assert run(["data", "prepare", *options, "--data.on_bad_row", "skip", "--data.loss_on", "all"]) == 0
    assert "learnt tokens" not in capsys.readouterr().out


def test_the_recipe_of_a_model_counts_as_in_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", "--model", "150m", "--data.source", "rows.jsonl", "--data.text_field", "body"]) == 0
    assert "sequences of 1024" in capsys.readouterr().out


def test_tokenizer_is_trained_and_kept_and_can_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "tokenizer", "--data.source", "rows.jsonl", "--data.text_field", "body"]
    assert run([*command, "--data.vocab_size", "280", "--to", "mine.json"]) == 0
    assert "280 tokens" in capsys.readouterr().out
    assert Tokenizer.load("mine.json").vocab_size == 280
    assert run([*command, "--to", "mine.json"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(["data", "prepare", "run.toml", "--data.vocab_size", "2048", "--data.tokenizer", "mine.json"]) == 0
    assert "280 tokens" in capsys.readouterr().out


def test_a_tokenizer_is_not_written_beside_the_description_of_another(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["data", "tokenizer", "--data.source", "rows.jsonl", "--data.text_field", "body", "--to"]
    (folder / "theirs").mkdir()
    (folder / "theirs" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with monkeypatch.context() as patched:
        patched.setattr("diloco.cli.data.train_tokenizer", lambda *_: pytest.fail("it was trained for nothing"))
        assert run([*command, "theirs/tok.json"]) == 2
    messages = capsys.readouterr().err
    assert "theirs/tok.json" in messages and "theirs/tokenizer_config.json exists and differs" in messages
    assert [path.name for path in (folder / "theirs").iterdir()] == ["tokenizer_config.json"]
    assert (folder / "theirs" / "tokenizer_config.json").read_text() == '{"eos_token": "</s>"}'
    assert run([*command, "one.json"]) == run([*command, "two.json"]) == 0
    assert "beside it tokenizer_config.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["prepare", "--workers", "3"], "--workers has no effect on `diloco data prepare`"),
        (["prepare", "--outer.lr=1"], "--outer.lr has no effect"),
        (
            ["tokenizer", "--data.shards", "3", "--to", "t.json"],
            "--data.shards has no effect on `diloco data tokenizer`",
        ),
        (["tokenizer"], "needs a place for the result: --to"),
        (["tokenizer", "--to", "nowhere/t.json"], "there is no folder nowhere"),
        (["prepare", "--data.partition", "clusters"], "--data.feature_model"),
        (["prepare", "--data.source", "nothing"], "no such file or folder"),
        (["prepare", "--data.sources", "x"], "sources"),
        (["prepare", "--data.shards", "2", "run.toml"], "run.toml"),
        (["prepare", "nowhere.toml"], "nowhere.toml does not exist"),
    ],
)
def test_a_bad_command_line_is_one_message_and_exit_code_2(
    tokens: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", *tokens]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("command", ["prepare", "tokenizer"])
def test_help_fits_a_screen_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["data", command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 25 and max(map(len, lines)) <= 80
    assert any(line.startswith(f"Example:  diloco data {command} ") for line in lines)


def test_ctrl_c_says_that_the_work_is_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("diloco.data.preparation.builder.batches", interrupted)
    assert run(["data", "prepare", "run.toml"]) == 1
    assert "the same command continues from here" in capsys.readouterr().out


def test_progress_copes_with_known_and_unknown_totals() -> None:
    for terminal in (False, True):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=100)
        with Preparing(console) as preparing:
            for stage, done, total in [("one", 0, 10), ("one", 10, 10), ("two", 1234, None), ("two", 99_999, None)]:
                preparing.show(stage, done, total)
        assert "one" in screen.getvalue() and "two" in screen.getvalue()
        assert ("99,999" if terminal else "1,234 so far") in screen.getvalue()


def test_shards_that_are_clusters_are_shown_with_what_is_in_them() -> None:
    meta = CorpusMeta(
        vocab_size=10, end_of_text=0, shard_tokens=(300, 100), validation_tokens=1, documents=2, characters=1,
        train_bytes=1, validation_bytes=1, unigram_perplexity=1.0, tokenizer_bytes=1, digest="", skipped={},
        partition="clusters", label_tokens={"law": (290, 10), "sea": (10, 90)},
    )  # fmt: skip
    assert meta.purity == {"law": 290 / 300, "sea": 0.9}
    assert meta.overall_purity == 380 / 400
    assert CorpusMeta.from_json(meta.to_json()) == meta
    screen = io.StringIO()
    Console(file=screen, width=100).print(shard_table(Corpus(Path("x"), meta)))
    for expected in ("75.0%", "law 97%, sea 3%", "sea 90%, law 10%", "law: 96.7% in one shard", "purity: 95.0%"):
        assert expected in screen.getvalue()
