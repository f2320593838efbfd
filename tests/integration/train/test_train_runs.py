"""`diloco train` to its end: equal anchors, learning, determinism, honest bytes, a model that others can load."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco.cli.main import run
from diloco.models.native.model import load_model
from diloco.training.records.summary import read_summary
from support.forks import fork_ranks, run_command, start_interpreter
from support.train_runs import Run, completed, start, tiny_options, write_text

pytestmark = pytest.mark.slow

STEPS = ("--steps=60", "--H=15")


PADDING = 1 + 1 / 64 + 0.005
"""A vector travels in whole parts, of which a small model has at most 64; headers are a few bytes in a thousand."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="module")
def first(text: Path) -> Run:
    """Two workers; several tests look at what it left."""
    return completed(text.parent / "first", text, *STEPS, launch=start_interpreter)


@pytest.fixture(scope="module")
def baseline(text: Path) -> Run:
    return completed(text.parent / "baseline", text, "--mode=data-parallel", "--steps=60")


def test_two_workers_end_with_equal_anchors_and_have_learned(first: Run) -> None:
    summary = first.summary
    assert len(summary["anchor_digests"]) == 2
    assert len(set(summary["anchor_digests"])) == 1
    assert summary["inner_steps"] == 60
    assert summary["rounds"] == 4
    assert summary["rounds_failed"] == 0
    assert summary["workers"] == 2
    assert summary["tokens"] == 2 * 60 * 8 * 16
    assert summary["validation_step"] == 60
    assert summary["validation_perplexity"] < 0.6 * summary["unigram_perplexity"]
    assert summary["initial_validation_perplexity"] > 200
    assert 0 < summary["compute_utilization"] < 1


def test_the_sizes_of_a_run_are_told_when_it_starts_and_measured_in_its_rounds(first: Run) -> None:
    for part in ("memory: about", "disk: ", "network: a worker sends", "measured: a round took"):
        assert part in first.output, first.output


def test_the_end_of_a_run_is_a_report_with_a_sample_and_the_folder(first: Run) -> None:
    for part in ("diloco · complete", "before", "after", "times as much", "on all 2 workers", "a sample of the model"):
        assert part in first.output, first.output
    assert f"run folder: {first.folder}" in first.output
    assert {path.name for path in first.folder.iterdir() if not path.name.startswith(".")} == {
        *("config.toml", "events.jsonl", "summary.json", "model", "logs", "checkpoints")
    }


def test_the_bytes_of_diloco_are_those_of_its_rounds(first: Run) -> None:
    summary = first.summary
    payload = 4 * 2 * summary["parameters"]  # four rounds; k = 2 sends 2 (k - 1) / k = one fp16 copy in each
    assert payload <= summary["bytes_sent_per_worker"] <= payload * PADDING
    assert 30 / PADDING <= summary["communication_reduction"] <= 30


def test_the_resolved_configuration_gives_the_identical_run_again_bit_for_bit(first: Run, text: Path) -> None:
    again = text.parent / "again"
    command = ["train", str(first.folder / "config.toml"), f"--out={again}"]
    with Run(again, command) as second:
        assert second.code() == 0, second.errors
        second.assert_nothing_is_left()
    assert second.summary["anchor_digests"] == first.summary["anchor_digests"]
    assert second.summary["validation_loss"] == first.summary["validation_loss"]
    weights = "model/model.safetensors"
    assert (second.folder / weights).read_bytes() == (first.folder / weights).read_bytes()


def test_one_worker_trains_alone_and_another_seed_is_another_run(text: Path) -> None:
    runs = [
        completed(text.parent / f"alone-{seed}", text, "--workers=1", f"--seed={seed}", "--steps=6", "--H=30")
        for seed in (0, 1)
    ]
    for run_ in runs:
        assert run_.summary["workers"] == 1
        assert run_.summary["bytes_sent_per_worker"] == 0
        assert run_.summary["communication_reduction"] is None
        assert len(run_.summary["anchor_digests"]) == 1
        # No round falls into the loop, and still there is a last one and the perplexity before.
        assert run_.summary["rounds"] == 1
        assert run_.summary["initial_validation_perplexity"] > 200
    assert runs[0].summary["anchor_digests"] != runs[1].summary["anchor_digests"]


def test_four_workers_with_int8_fragments_and_overlap_end_with_equal_anchors(text: Path) -> None:
    options = ["--workers=4", "--codec=int8", "--sync.fragments=2", "--sync.overlap_steps=2", "--sync.mixing=0.5"]
    run_ = completed(text.parent / "four", text, *options, "--steps=40", "--H=8")
    summary = run_.summary
    assert len(summary["anchor_digests"]) == 4
    assert len(set(summary["anchor_digests"])) == 1
    assert summary["workers"] == 4
    assert summary["rounds_failed"] == 0
    assert summary["rounds"] >= 5 * 3  # two fragments of blocks, and what is outside the blocks
    assert summary["validation_perplexity"] < summary["unigram_perplexity"]
    assert summary["tokens"] == 4 * 40 * 8 * 16
    overlapped = [event for event in run_.events if event["type"] == "round" and event["worker"] == 0]
    assert {event["fragment"] for event in overlapped} == {0, 1, 2}


def test_the_baseline_ends_with_equal_parameters_and_sends_what_its_formula_says(baseline: Run) -> None:
    summary = baseline.summary
    assert len(summary["anchor_digests"]) == 2
    assert len(set(summary["anchor_digests"])) == 1
    assert summary["rounds"] == summary["inner_steps"] == 60
    assert summary["codec"] == "fp32"
    measured, formula = summary["bytes_sent_per_worker"], summary["data_parallel_bytes_per_worker"]
    assert formula <= measured <= formula * PADDING
    assert summary["validation_perplexity"] < summary["unigram_perplexity"]
    assert "times as much" not in baseline.output


def test_compare_states_the_gap_and_the_reduction_of_real_runs(
    first: Run, baseline: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(["compare", str(first.folder), str(baseline.folder)]) == 0
    shown = capsys.readouterr().out
    ratio = first.summary["validation_perplexity"] / baseline.summary["validation_perplexity"]
    assert f"{ratio - 1:+.2%}" in shown
    assert "other tokens" not in shown
    less = baseline.summary["bytes_sent_per_worker"] / first.summary["bytes_sent_per_worker"]
    assert f"{less:,.1f}x less" in shown


def test_the_model_of_a_run_loads_with_transformers_and_gives_the_same_logits(first: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = first.folder / "model"
    ours = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder).encode("the cat sat on the mat")])
    assert tokens.shape[1] > 3
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def torchrun(text: Path, folder: Path, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    return [*launcher, "-m", "diloco.cli.main", "train", *tiny_options(text), f"--out={folder}", *options]


def test_under_torchrun_the_same_run_ends_with_the_same_anchors_and_one_summary(first: Run, text: Path) -> None:
    folder = text.parent / "torchrun"
    with Run(folder, torchrun(text, folder, *STEPS), launch=run_command) as run_:
        assert run_.code() == 0, run_.errors
        run_.assert_nothing_is_left()
    assert run_.output.count("diloco · complete") == 1
    assert read_summary(folder)["anchor_digests"] == first.summary["anchor_digests"]
    assert read_summary(folder)["workers"] == 2
    assert (folder / "model" / "config.json").exists()


def test_a_stop_of_one_rank_of_torchrun_ends_all_workers_with_a_summary(text: Path) -> None:
    folder = text.parent / "torchrun-stopped"
    with start(folder, text, "--steps=100000", "--H=5", launch=fork_ranks(2)) as run_:
        run_.wait_for_step(6)
        ranks = [pid for pid, _ in run_.processes() if pid != run_.process.pid]
        os.kill(min(ranks), signal.SIGTERM)
        assert run_.code() == 0, run_.errors
        run_.assert_nothing_is_left()
    assert run_.summary["status"] == "stopped"
    assert len(set(run_.summary["anchor_digests"])) == 1


def test_the_module_is_also_a_command() -> None:
    script = Path(sys.executable).with_name("diloco")
    ended = subprocess.run([str(script), "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
