"""`--estimate`: the sizes of a run, told without starting it; and the lines that a run begins with."""

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diloco.cli.display.sizes import measured_line, size_lines, sizes_printer
from diloco.cli.join import estimate_options
from diloco.cli.main import run
from diloco.errors import ConfigError
from diloco.history.events import RoundEndedEvent, StepEvent, WorkerStartedEvent, make_event
from diloco.history.log import EventLog
from diloco.history.rounds import RoundHistory
from diloco.history.run_history import LiveHistory
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.sizes import room
from support.train_runs import tiny_options, write_text

SIZES: dict[str, Any] = {
    "parameters": 134_515_008,
    "processes": 2,
    "process_bytes": 4_900_000_000,
    "device_bytes": 0,
    "network_process_bytes": 0,
    "memory_available": 21_300_000_000,
    "disk": {"checkpoint_bytes": 4_304_480_256, "checkpoints": 1, "at_once": 1, "model_bytes": 538_060_032},
    "disk_peak_bytes": 4_842_540_288,
    "disk_free": 70_000_000_000,
    "round_bytes": 269_000_000,
    "round_steps": 5,
    "round_seconds": {"100": 21.52},
    "bytes_per_day": None,
    "step_seconds": None,
    "step_measured": False,
    "warnings": ["this machine has too little"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def estimated(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(["train", "--estimate", "--device=cpu", *options]) == 0
    return capsys.readouterr().out


def test_an_estimate_tells_all_sizes_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = estimated(capsys, "--workers=3", "--bandwidth", "100mbit")
    for part in ("memory: about", "disk:", "network: a worker sends", "at 100 Mbit/s", "anchor", "gradients"):
        assert part in shown
    assert not list(tmp_path.iterdir())


def test_as_json_it_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(estimated(capsys, "--json", "--bandwidth=1gbit", "--model.num_layers=2"))
    assert told["process_bytes"] == sum(told["memory"].values())
    assert told["round_seconds"]["1000"] == pytest.approx(8e-9 * told["round_bytes"])
    assert told["disk_peak_bytes"] == 3 * told["disk"]["checkpoint_bytes"] + 4 * told["parameters"]
    assert told["step_seconds"] > 0 and not told["step_measured"]
    assert told["bytes_per_day"] == pytest.approx(
        told["round_bytes"] * 86_400 / (told["round_steps"] * told["step_seconds"])
    )
    four = json.loads(estimated(capsys, "--json"))
    assert four["parameters"] > told["parameters"]


def test_a_run_that_has_measured_its_speed_tells_bytes_a_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(RunConfig(steps=100)))
    log = EventLog(tmp_path / "run", 0)
    log.emit(StepEvent(step=10, elapsed_seconds=20.0))
    log.emit(RoundEndedEvent(sequence=0, mean_norm=1.0, bytes_sent=10**6, seconds=1.0))
    log.close()
    told = json.loads(estimated(capsys, "--resume=run", "--json"))
    assert list(told["round_seconds"]) == ["8"] and told["step_measured"]
    assert told["bytes_per_day"] == pytest.approx(told["round_bytes"] * 86_400 / (500 * 2.0))


def test_a_run_that_has_started_has_the_vocabulary_that_its_text_supports(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("run")
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(RunConfig()))
    asked = json.loads(estimated(capsys, "--resume=run", "--json"))["parameters"]
    log = EventLog(folder, 0)
    log.emit(WorkerStartedEvent(resolved={"data.vocab_size": 324}))
    log.close()
    assert json.loads(estimated(capsys, "--resume=run", "--json"))["parameters"] < asked


def test_what_would_be_refused_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_disk", lambda _: 1000)
    shown = " ".join(estimated(capsys).split())
    assert "this run would be refused: there is no room for this run's checkpoints" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--estimate", "--bandwidth=fast"], "100mbit"),
        (["--bandwidth=100mbit"], "--bandwidth has an effect with --estimate only"),
        (["--json"], "--json has an effect with --estimate only"),
    ],
)
def test_options_of_an_estimate_are_checked(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_without_room_for_its_checkpoints_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_disk", lambda _: 1000)
    text = write_text(tmp_path / "text.txt", 2000)
    assert run(["train", *tiny_options(text), f"--out={tmp_path / 'run'}"]) == 2
    assert "there is no room for this run's checkpoints" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_joining_takes_the_options_of_an_estimate_apart() -> None:
    given = ("--workers", "2", "--estimate", "--bandwidth", "1gbit", "--json", "--device=cpu")
    asked, rest = estimate_options(given)
    assert asked.keys() == {"estimate", "json", "bandwidth"} and asked["bandwidth"] == "1gbit"
    assert rest == ("--workers", "2", "--device=cpu")
    with pytest.raises(ConfigError, match="--bandwidth has an effect with --estimate only"):
        estimate_options(("--bandwidth=1gbit",))


# The lines at the start of a run


def test_a_run_begins_with_three_plain_lines() -> None:
    assert size_lines(SIZES) == [
        "memory: about 4.9 GB a process (2 processes, 21.3 GB available); 134.5M parameters",
        "disk: 4.84 GB (70 GB free): checkpoints of 4.3 GB, one, at the end; the model 538 MB",
        "network: a worker sends 269 MB every 5 steps: 22 s at 100 Mbit/s",
    ]
    swarm = size_lines(SIZES | {"network_process_bytes": 350_000_000})[0]
    assert swarm.startswith("memory: about 4.9 GB a process and 350 MB for its network (2 processes")
    none = SIZES | {"disk": SIZES["disk"] | {"checkpoints": 0}, "round_bytes": 0}
    assert size_lines(none)[1:] == [
        "disk: 538 MB for the model, no checkpoints",
        "network: nothing is sent, this worker is alone",
    ]


def test_sizes_and_warnings_are_printed_once_and_then_what_rounds_took(tmp_path: Path) -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    live = LiveHistory(tmp_path)
    poll = sizes_printer(console, live)
    logs = [EventLog(tmp_path, worker) for worker in range(2)]
    for log in logs:
        log.emit(make_event("sizes", SIZES))
    live.refresh()
    poll()
    assert console.export_text().splitlines() == [*size_lines(SIZES), "warning: this machine has too little"]
    for sequence in range(3):
        time.sleep(0.01)  # the clock of events has four digits
        for log in logs:
            log.emit(RoundEndedEvent(sequence=sequence, mean_norm=1.0, bytes_sent=10**6, seconds=0.5))
        live.refresh()
        poll()
    shown = console.export_text().splitlines()
    assert len(shown) == 1 and shown[0].startswith("measured: a round took 0.5 s (16 Mbit/s)")


def test_the_measured_line_tells_bytes_a_day() -> None:
    told: dict[str, float | None] = {"seconds": 2.0}
    first, second = (RoundHistory(0, time=t, bytes_sent=269_000_000, statistics=told) for t in (100.0, 160.0))
    assert measured_line(first, second) == (
        "measured: a round took 2 s (1.08 Gbit/s), one every 60 s: 387 GB a day from each worker"
    )
    assert measured_line(first, replace(second, bytes_sent=0)) is None
