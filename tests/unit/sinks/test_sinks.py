"""Each sink, through its own package or a stand-in for it; and which sinks there are."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from diloco.cli.main import run as diloco
from diloco.errors import ConfigError
from diloco.sinks.follower import open_follower
from diloco.sinks.registry import SINKS, check_installed
from diloco.training.config.run import SINK_NAMES, RunConfig
from support.recorded_runs import CONFIG, RESUMED, RUN, append, run_folder
from support.sink_packages import install


def carry(run: Path, name: str) -> None:
    with open_follower(run, name, SINKS[name]) as follower:
        follower.catch_up()
    assert (follower.state.error, follower.state.lost) == (None, 0)


# TensorBoard, read back from its files


def accumulated(run: Path, part: str) -> Any:
    accumulator = EventAccumulator(str(run / "sinks" / "tensorboard" / part), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(run: Path, part: str, tag: str) -> list[tuple[int, float]]:
    return [(entry.step, entry.value) for entry in accumulated(run, part).Scalars(tag)]


def test_tensorboard_has_the_same_tags_for_every_worker_and_one_more_run_for_all(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN)
    carry(run, "tensorboard")
    assert scalars(run, "worker-0", "train/loss") == [(10, 4.0), (20, 3.0)]
    assert scalars(run, "worker-1", "train/loss") == [(10, 5.0), (20, 3.5)]
    assert scalars(run, "all", "validation/perplexity") == [(0, 64.0), (10, 8.0)]
    assert scalars(run, "all", "round/similarity") == [(10, 0.25), (20, 0.25)]
    assert [entry.wall_time for entry in accumulated(run, "worker-0").Scalars("train/loss")] == [1010.0, 1020.0]


def test_tensorboard_has_the_options_as_hyperparameters_and_the_summary_as_text(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN)
    carry(run, "tensorboard")
    everything = accumulated(run, "all")
    hyperparameters = next(iter(everything.PluginTagToContent("hparams").values()))
    assert b"sync.codec" in hyperparameters
    assert b"inner.lr" in hyperparameters
    summary = everything.Tensors("summary")[0].tensor_proto.string_val[0].decode()
    assert "| status | failed |" in summary


@pytest.mark.parametrize("sessions", [1, 2])
def test_tensorboard_shows_a_repeated_stretch_once_as_it_was_the_last_time(
    tmp_path: Path, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files are read by their names: the second, the process, and a number that must not turn from 9 to 10 in here.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    run = run_folder(tmp_path, RUN, ended=False)
    if sessions == 2:
        carry(run, "tensorboard")
    append(run, RESUMED)
    carry(run, "tensorboard")
    assert scalars(run, "worker-0", "train/loss") == [(10, 4.0), (20, 2.5), (30, 2.0)]
    assert scalars(run, "all", "round/similarity") == [(10, 0.25), (20, 0.25)]


# W&B and trackio


def test_wandb_gets_rows_on_an_axis_of_our_own_the_options_and_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    sessions = install(monkeypatch, "wandb")
    run = run_folder(tmp_path / "my-run", RUN)
    carry(run, "wandb")
    (session,) = sessions
    assert session.options["project"] == "diloco"
    assert session.options["name"] == "my-run"
    assert session.options["config"]["steps"] == CONFIG.steps
    assert session.metrics == [("step", None), ("*", "step")]
    rows = [row for _, row in session.rows if "train/loss/worker_1" in row]
    assert [(row["step"], row["train/loss/worker_1"]) for row in rows] == [(10, 5.0), (20, 3.5)]
    assert {step for step, _ in session.rows} == {None}  # W&B's own steps may only rise
    assert session.summary["status"] == "failed"
    assert session.finished


def test_wandb_is_given_the_same_id_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = install(monkeypatch, "wandb")
    run, other = run_folder(tmp_path / "a", RUN), run_folder(tmp_path / "b", RUN)
    for each in (run, run, other):
        carry(each, "wandb")
    first, second, third = (session.options["id"] for session in sessions)
    assert first == second != third


def test_trackio_gets_rows_by_step_and_goes_on_with_the_run_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    sessions = install(monkeypatch, "trackio")
    run = run_folder(tmp_path / "my-run", RUN, ended=False)
    carry(run, "trackio")
    append(run, RESUMED)
    run_folder(run, [])
    carry(run, "trackio")
    assert [session.options["resume"] for session in sessions] == ["never", "allow"]
    assert {session.options["project"] for session in sessions} == {"mine"}
    rows = [
        (step, row["train/loss/worker_0"])
        for session in sessions
        for step, row in session.rows
        if "train/loss/worker_0" in row
    ]
    assert rows == [(10, 4.0), (20, 3.0), (20, 2.5), (30, 2.0)]
    last_step, last = sessions[1].rows[-1]
    assert (last_step, last["summary/inner_steps"]) == (30, 30)


# Which there are


def test_every_name_of_the_option_has_a_sink_and_an_extra_of_its_package() -> None:
    assert set(SINKS) == set(SINK_NAMES)
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, kind in SINKS.items():
        assert any(requirement.startswith(kind.package) for requirement in extras[name])


def test_several_sinks_are_given_with_commas() -> None:
    assert RunConfig(sinks="tensorboard, wandb").sink_names == ("tensorboard", "wandb")
    assert RunConfig().sink_names == ()


@pytest.mark.parametrize("sinks", ["mlflow", "wandb,wandb", "tensorboard,", ""])
def test_unknown_empty_and_repeated_sinks_are_refused(sinks: str) -> None:
    with pytest.raises(ConfigError, match="one of tensorboard, wandb, trackio, and only once"):
        RunConfig(sinks=sinks)


def test_the_sinks_are_one_machines_own_matter() -> None:
    assert RunConfig(sinks="wandb").identity("digest", "model") == RunConfig().identity("digest", "model")


@pytest.mark.parametrize("command", [["train", "--sinks=tensorboard,trackio"], ["sink", "run", "trackio"]])
def test_a_missing_package_is_an_error_with_the_remedy_before_anything_is_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    if command[0] == "sink":
        run_folder(tmp_path / "run", RUN)
    before = sorted(tmp_path.rglob("*"))
    assert diloco(command) == 2
    assert "pip install -c constraints.txt -e '.[trackio]'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_installed_package_is_fine() -> None:
    check_installed(["tensorboard"])


# diloco sink


def test_the_verb_carries_an_ended_run_and_says_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", RUN)
    assert diloco(["sink", str(run), "tensorboard"]) == 0
    assert f"{len(RUN)} events" in capsys.readouterr().out
    assert scalars(run, "worker-0", "train/loss") == [(10, 4.0), (20, 3.0)]


def test_the_verb_fails_if_the_sink_did_not_take_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*_: object) -> None:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(SINKS["tensorboard"], "write", away)
    assert diloco(["sink", str(run_folder(tmp_path / "run", RUN)), "tensorboard"]) == 1
    assert "could not write 10 events, the first because: ConnectionError" in capsys.readouterr().err


def test_the_verb_says_why_a_sink_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no API key: log in first")

    monkeypatch.setattr(SINKS["tensorboard"], "start", refuse)
    assert diloco(["sink", str(run_folder(tmp_path / "run", RUN)), "tensorboard"]) == 1
    expected = "the sink tensorboard could not be started: PermissionError: no API key: log in first"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("run", "name"), [("nowhere", "tensorboard"), ("run", "mlflow")])
def test_the_verb_refuses_other_folders_and_other_sinks(
    run: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path / "run", RUN)
    assert diloco(["sink", str(tmp_path / run), name]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_folder_without_options_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diloco(["sink", str(tmp_path), "tensorboard"]) == 2
    assert "is not a run folder: it has no config.toml" in " ".join(capsys.readouterr().err.split())
