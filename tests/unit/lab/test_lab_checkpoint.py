"""An arm in progress is saved, and goes on from there with the same bits."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.data.corpus import Corpus
from diloco.errors import ConfigError
from diloco.lab import runs, scales, texts
from diloco.lab.arm import Arm, ArmResult, Progress
from diloco.lab.results import ResultFolder
from diloco.lab.runs import Conditions, Runner
from diloco.lab.simulation import checkpoint
from diloco.lab.simulation.checkpoint import ArmCheckpoint, Interrupted
from diloco.lab.simulation.simulator import simulate
from diloco.lab.tasks import ArmTask
from support.synthetic_corpus import synthetic_corpus

MODEL = {
    "hidden_size": 8, "intermediate_size": 16, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
    "tie_embeddings": True,
}  # fmt: skip
CLASSIC: dict[str, Any] = {"pretraining_steps": 2}
LATE: dict[str, Any] = {
    "sync": {"num_inner_steps": 4, "codec": "e3m0", "fragments": 2, "overlap_steps": 1, "error_feedback": True},
    "drop": 0.3, "absences": ((1, 4, 8),), "away": 0.3, "slow_rounds": (0.4, 0.5), "slow": "fewer_steps",
}  # fmt: skip
DATA_PARALLEL: dict[str, Any] = {"mode": "data_parallel", "sync": {}, "slow_rounds": (0.4, 0.5)}
MOMENTS: dict[str, Any] = {
    "sync": {"num_inner_steps": 4, "codec": "fp16", "second_moment_every": 2}, "active_workers": (1, 3)
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return synthetic_corpus(tmp_path_factory.mktemp("lab") / "corpus", 32, 4000, shards=2)


def arm(**options: Any) -> Arm:
    usual: dict[str, Any] = {
        "model": MODEL, "workers": 3, "steps": 12, "batch_size": 1, "sequence_length": 4, "eval_points": 3,
        "eval_windows": 4, "inner": {"lr": 1e-2}, "sync": {"num_inner_steps": 4, "codec": "fp32"},
    }  # fmt: skip
    return Arm("test", **usual | options)


def same(a: ArmResult, b: ArmResult) -> bool:
    """Everything but how long this computer took."""
    no_time: dict[str, Any] = {"seconds": 0.0, "replica_step_seconds": 0.0}
    return replace(a, **no_time) == replace(b, **no_time)


def interrupted(interrupted_arm: Arm, corpus: Corpus, path: Path, step: int, how: str, seed: int = 0) -> None:
    """Ends after this step, counted from the beginning of the arm."""
    taken = 0

    def on_progress(progress: Progress) -> None:
        nonlocal taken
        taken = progress.step if progress.phase == "training" else 0

    checkpoint_file = ArmCheckpoint(path, stop=lambda: taken == step)
    with pytest.raises(Interrupted):
        simulate(interrupted_arm, seed, corpus, "cpu", how=how, on_progress=on_progress, checkpoint=checkpoint_file)


@pytest.mark.parametrize(
    ("options", "how", "stops"),
    [
        (CLASSIC, "stacked", (3, 8)),
        (CLASSIC, "sequential", (4,)),
        (LATE, "stacked 2", (2, 6, 10)),
        (LATE, "sequential", (7,)),
        (DATA_PARALLEL, "stacked", (5,)),
        (DATA_PARALLEL, "sequential", (5,)),
        (MOMENTS, "stacked", (7,)),
    ],
    ids=lambda tested_arm: next(
        (name for name, value in globals().items() if value is tested_arm and name.isupper()), str(tested_arm)
    ),
)
def test_an_interrupted_arm_gives_the_result_of_one_that_was_not(
    corpus: Corpus, tmp_path: Path, options: dict[str, Any], how: str, stops: tuple[int, ...]
) -> None:
    tested_arm, path = arm(**options), tmp_path / "arm.safetensors"
    expected = simulate(tested_arm, 0, corpus, "cpu", how=how)
    for step in stops:
        interrupted(tested_arm, corpus, path, step, how)
    checkpoint_file = ArmCheckpoint(path)
    result = simulate(tested_arm, 0, corpus, "cpu", how=how, checkpoint=checkpoint_file)
    assert checkpoint_file.resumed_at == stops[-1]
    assert same(result, expected)


def test_saving_on_the_way_changes_nothing(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_SHARE_OF_TIME", math.inf)
    checkpoint_file = ArmCheckpoint(tmp_path / "arm.safetensors", seconds=0.0)
    saved_steps: list[int] = []
    monkeypatch.setattr(checkpoint_file, "write", lambda state, _: saved_steps.append(state.numbers["step"]))
    result = simulate(arm(**LATE), 0, corpus, "cpu", how="stacked", checkpoint=checkpoint_file)
    assert saved_steps == list(range(1, 12))
    assert same(result, simulate(arm(**LATE), 0, corpus, "cpu", how="stacked"))


def test_a_checkpoint_of_other_code_or_a_damaged_one_is_told_and_not_used(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tested_arm, path = arm(steps=5), tmp_path / "arm.safetensors"
    expected = simulate(tested_arm, 0, corpus, "cpu", how="stacked")
    for damage, message in (
        ("code", "is of another code"),
        ("seed", "is of another seed"),
        ("bytes", "cannot be read"),
    ):
        caplog.clear()
        with monkeypatch.context() as patch:
            if damage == "code":
                patch.setattr(checkpoint, "code_version", lambda: "another")
            interrupted(tested_arm, corpus, path, 2, "stacked", seed=int(damage == "seed"))
        if damage == "bytes":
            path.write_bytes(path.read_bytes()[:-10])
        checkpoint_file = ArmCheckpoint(path)
        assert same(simulate(tested_arm, 0, corpus, "cpu", how="stacked", checkpoint=checkpoint_file), expected)
        assert checkpoint_file.resumed_at == 0
        assert message in caplog.text and "the arm begins anew" in caplog.text


def test_an_arm_whose_checkpoint_cannot_be_written_goes_on(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    checkpoint_file = ArmCheckpoint(tmp_path / "file" / "arm.safetensors", seconds=0.0)
    assert simulate(arm(steps=4), 0, corpus, "cpu", how="stacked", checkpoint=checkpoint_file).rounds == 1
    assert "the arm in progress cannot be saved" in caplog.text


def test_ctrl_c_saves_the_arm_in_progress_and_the_same_run_goes_on(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "open_text", lambda *_: corpus)
    tasks = tuple(
        ArmTask(f"{lr}-0", "code", f"lr {lr}", arm(steps=7, outer={"lr": lr}), 0, "text") for lr in (0.3, 0.7)
    )
    former_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
    lines: list[str] = []

    def press(progress: Progress) -> None:
        if progress.arm == "test" and progress.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    def run(folder: str) -> int:
        (tmp_path / folder / "results").mkdir(parents=True, exist_ok=True)
        conditions = Conditions(texts.Texts("", "", scales.SCALES["smoke"]), tmp_path / folder, "cpu", how="stacked")
        with Runner(conditions, lines.append) as runner:
            return runner.run(tasks)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "simulate", lambda *args, **options: simulate(*args, **options | {"on_progress": press}))
        with pytest.raises(KeyboardInterrupt):
            run("out")
    assert "2 remain; what was in progress is saved" in lines[-1]
    assert signal.signal(signal.SIGINT, former_handler) is signal.default_int_handler
    [checkpoint_path] = (tmp_path / "out" / "checkpoints").iterdir()
    assert run("out") == 0
    assert [line for line in lines if "continued from step 5" in line and "lr 0.3" in line]
    assert not checkpoint_path.exists()
    assert run("other") == 0
    for key in ("0.3-0", "0.7-0"):
        resumed, expected = (ResultFolder(tmp_path / folder).read(key) for folder in ("out", "other"))
        assert resumed is not None and expected is not None and same(resumed.result, expected.result)


def test_a_checkpoint_of_a_finished_arm_is_removed(corpus: Corpus, tmp_path: Path) -> None:
    results = ResultFolder(tmp_path)
    (tmp_path / "results").mkdir()
    results.write("a-0", "code", simulate(arm(steps=4), 0, corpus, "cpu", how="stacked"))
    conditions = Conditions(texts.Texts("", "", scales.SCALES["smoke"]), tmp_path, "cpu")
    task = ArmTask("a-0", "code", "", arm(), 0, "text")
    checkpoint_path = conditions.checkpoint_path(task)
    checkpoint_path.parent.mkdir()
    checkpoint_path.write_text("")
    with Runner(conditions, lambda _: None) as runner:
        assert runner.run([task]) == 0
    assert not checkpoint_path.exists()


def test_a_bad_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="--save-seconds nan must be at least 0"):
        Conditions(texts.Texts("", "", scales.SCALES["smoke"]), Path("none"), "cpu", save_seconds=math.nan)
