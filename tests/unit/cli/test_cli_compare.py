"""`diloco compare`: what runs were asked to do and what came of it, side by side, as a table, JSON or CSV."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import run
from diloco.core.config import OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.records.summary import SUMMARY_FILE, summarize, write_summary
from support.event_log import history_of

CONFIG = RunConfig(seed=7, sync=SyncConfig(num_inner_steps=30, codec="int8"), outer=OuterConfig(momentum=0.5))
BASELINE = RunConfig(mode="data-parallel", seed=8, sync=SyncConfig(codec="fp32"))


def make_run(folder: Path, config: RunConfig = CONFIG, perplexity: float | None = 10.0, **numbers: Any) -> str:
    """A run folder with a configuration and a summary."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    loss = None if perplexity is None else math.log(perplexity)
    summary = summarize(config, history_of([])) | {
        "status": "complete",
        "error": None,
        "parameters": 1_630_000,
        "tokens": 5120,
        "inner_steps": 40,
        "rounds": 4,
        "validation_step": None if perplexity is None else 40,
        "validation_loss": loss,
        "validation_perplexity": perplexity,
        "bytes_sent_per_worker": 13_100_000 if config.mode == "diloco" else 261_200_000,
        "compute_utilization": 0.75,
        "training_seconds": 50.0,
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary | numbers))
    return str(folder)


def compared(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(["compare", *options]) == 0
    return capsys.readouterr().out


def rows_of(shown: str) -> dict[str, list[str]]:
    lines = [line.strip("│").split("│") for line in shown.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(["compare", *options]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_what_the_runs_were_asked_to_do_has_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunConfig(
        seed=1,
        outer=OuterConfig("adam", lr=0.1),
        sync=SyncConfig(num_inner_steps=50),
        data=DataConfig(partition="clusters", feature_model="m"),
        inner=replace(RunConfig().inner, lr=5e-5),
    )
    rows = rows_of(compared(capsys, make_run(tmp_path / "one"), make_run(tmp_path / "two", other)))
    assert rows["H"] == ["30", "50"]
    assert rows["outer optimizer"] == ["nesterov", "adam"]
    assert rows["outer learning rate"] == ["0.7", "0.1"]  # the first is the optimizer's default
    assert rows["outer momentum"] == ["0.5", "-"]
    assert rows["inner learning rate"] == ["0.0004", "5e-05"]
    assert rows["seed"] == ["7", "1"]
    assert rows["partition"] == ["iid", "clusters"]
    assert rows["codec"] == ["int8", "fp16"]
    assert "warm start" not in rows and "fragments" not in rows  # no run has them


def test_what_only_some_runs_use_has_a_row_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm = RunConfig(sync=SyncConfig(warm_start=40, outer_overlap="eager"))
    pruned = RunConfig(sync=SyncConfig(prune=0.5))
    runs = [make_run(tmp_path / "a", pruned), make_run(tmp_path / "b", warm), make_run(tmp_path / "c", BASELINE)]
    rows = rows_of(compared(capsys, *runs))
    assert rows["warm start"] == ["-", "40", "-"]
    assert rows["outer overlap"] == ["-", "eager", "-"]
    assert rows["prune"] == ["0.5", "-", "-"]
    told = json.loads(compared(capsys, *runs, "--json"))["runs"]
    assert [one["warm_start"] for one in told] == [0, 40, None]


def test_the_gap_and_the_reduction_are_against_the_data_parallel_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(compared(capsys, make_run(tmp_path / "a", perplexity=10.3), make_run(tmp_path / "b", BASELINE)))
    assert rows["perplexity against reference"] == ["+3.00%", "reference"]
    assert rows["sent against reference"] == ["19.9x less", "reference"]
    assert rows["validation perplexity"] == ["10.30", "10.00"]
    assert rows["H"] == ["30", "-"] and rows["outer optimizer"] == ["nesterov", "-"]


def test_the_bytes_of_a_run_without_rounds_or_with_other_tokens_are_not_given_as_a_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = make_run(tmp_path / "baseline", BASELINE)
    ended_early = make_run(tmp_path / "early", tokens=2560)
    failed = make_run(tmp_path / "failed", status="failed", rounds=0, bytes_sent_per_worker=246)
    alike = make_run(tmp_path / "alike", bytes_sent_per_worker=261_300_000)
    for other, told in ((ended_early, "19.9x less (other tokens)"), (failed, "-"), (alike, "as much")):
        rows = rows_of(compared(capsys, baseline, other))
        assert rows["sent against reference"] == ["reference", told]


def test_a_better_and_chattier_run_is_stated_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better = make_run(tmp_path / "a", perplexity=9.0, bytes_sent_per_worker=522_400_000)
    shown = compared(capsys, better, make_run(tmp_path / "b", BASELINE))
    assert "-10.00%" in shown and "2.0x more" in shown


def test_runs_of_unequal_tokens_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = make_run(tmp_path / "a", perplexity=11.0, tokens=1000)
    assert "+10.00% (other tokens)" in compared(capsys, short, make_run(tmp_path / "b", BASELINE))


def test_the_reference_is_the_first_run_or_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_run(tmp_path / "a", perplexity=10.0), make_run(tmp_path / "b", perplexity=12.0)
    assert rows_of(compared(capsys, one, two))["perplexity against reference"] == ["reference", "+20.00%"]
    named = rows_of(compared(capsys, one, two, "--against", two))["perplexity against reference"]
    assert named == ["-16.67%", "reference"]
    added = rows_of(compared(capsys, one, "--against", two))["perplexity against reference"]
    assert added == named


def test_a_run_that_was_never_evaluated_has_no_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = make_run(tmp_path / "a", perplexity=None, status="failed", bytes_sent_per_worker=0, parameters=None)
    rows = rows_of(compared(capsys, failed, make_run(tmp_path / "b", BASELINE)))
    assert rows["perplexity against reference"][0] == "-" and rows["sent against reference"][0] == "-"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_names_are_whole_however_narrow_the_terminal_and_however_many_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = [f"2026-11-15-101500-a-model-with-a-long-name-{number}" for number in range(7)]
    shown = compared(capsys, *(make_run(tmp_path / name) for name in names))
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert sorted("".join(pieces) for pieces in _headers(shown)) == names


def _headers(shown: str) -> list[list[str]]:
    """The pieces of each column's header."""
    found: list[list[str]] = []
    for block in shown.split("┏")[1:]:
        lines = [line[1:-1].split("┃") for line in block.splitlines() if line.startswith("┃")]
        found += [[cells[column].strip() for cells in lines] for column in range(1, len(lines[0]))]
    return found


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = compared(capsys, make_run(tmp_path / "here" / "x"), make_run(tmp_path / "there" / "x"))
    assert "here/x" in shown and "there/x" in shown


def test_json_and_csv_have_the_same_numbers_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = make_run(tmp_path / "ours", perplexity=10.3), make_run(tmp_path / "baseline", BASELINE)
    told = json.loads(compared(capsys, *runs, "--json"))
    assert told["reference"] == "baseline"
    ours = told["runs"][0]
    assert (ours["name"], ours["folder"], ours["num_inner_steps"], ours["seed"]) == ("ours", runs[0], 30, 7)
    assert ours["perplexity_gap"] == pytest.approx(0.03) and ours["bytes_ratio"] == pytest.approx(13.1 / 261.2)
    rows = list(csv.DictReader(io.StringIO(compared(capsys, *runs, "--csv"))))
    assert [row["name"] for row in rows] == ["ours", "baseline"]
    assert rows[0].keys() == ours.keys()
    assert float(rows[0]["perplexity_gap"]) == ours["perplexity_gap"] and rows[1]["outer_lr"] == ""


def test_folders_that_are_no_ended_runs_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_summary(tmp_path, RunConfig())
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.toml").write_text("")
    assert "at least two" in refused(capsys)
    assert "at least two" in refused(capsys, str(tmp_path))
    assert "at least two" in refused(capsys, str(tmp_path), "--against", str(tmp_path))
    assert "no such folder" in refused(capsys, str(tmp_path), str(tmp_path / "nowhere"))
    assert "has not ended" in refused(capsys, str(tmp_path), str(unfinished))
    assert "choose one" in refused(capsys, str(tmp_path), str(tmp_path), "--json", "--csv")
    (unfinished / SUMMARY_FILE).write_text("{}")
    assert "not the summary" in refused(capsys, str(tmp_path), str(unfinished))


def test_failed_runs_are_compared_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_summary(tmp_path / name, RunConfig(), "broken")
    assert "failed" in compared(capsys, str(tmp_path / "one"), str(tmp_path / "two"))


def test_a_sentence_says_what_was_saved_and_what_it_cost_against_data_parallel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = make_run(tmp_path / "ours", perplexity=11.0), make_run(tmp_path / "theirs", BASELINE)
    told = (
        "ours sent 20 times fewer bytes than theirs for the same tokens, and its validation loss is 0.095 (4.1%) higher"
    )
    assert f"{told}." in compared(capsys, ours, theirs).splitlines()
    more = make_run(tmp_path / "more", tokens=10_240)
    assert "fewer bytes" not in compared(capsys, more, theirs)  # the tokens differ, and so does what the loss means


def test_a_validation_that_is_not_of_the_end_says_its_step_and_no_saving_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = make_run(tmp_path / "stopped", perplexity=2000.0, status="stopped", validation_step=0)
    baseline = make_run(tmp_path / "baseline", BASELINE)
    shown = compared(capsys, stopped, baseline)
    rows = rows_of(shown)
    assert rows["validation perplexity"] == ["2000.00 at step 0", "10.00"]
    assert rows["validation loss"] == ["7.6009 at step 0", "2.3026"]
    assert rows["perplexity against reference"][0].endswith("(not at the end)")
    assert "fewer bytes" not in shown
    assert json.loads(compared(capsys, stopped, baseline, "--json"))["runs"][0]["validation_step"] == 0
    ended = make_run(tmp_path / "ended")
    assert rows_of(compared(capsys, ended, stopped))["perplexity against reference"] == [
        "reference",
        "+19900.00% (not at the end)",
    ]
