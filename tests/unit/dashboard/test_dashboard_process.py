"""The dashboard beside a run: a process of its own, which ends with the run."""

import http.client
import socket
import time
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli.display.run_display import RunDisplay
from diloco.cli.main import run as run_command
from diloco.dashboard import process
from diloco.dashboard.process import DashboardProcess, listen
from diloco.errors import ConfigError
from diloco.training.config.run import RunConfig
from support.dashboard_runs import calm_events, write_run


def _status(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/api/run/run/state")
        return connection.getresponse().status
    finally:
        connection.close()


def test_it_answers_during_the_run_and_ends_with_it(tmp_path: Path) -> None:
    run, reports = write_run(tmp_path / "run", calm_events()), []
    listener = listen(0)
    port = listener.getsockname()[1]
    with DashboardProcess(listener, run, reports.append) as beside:
        assert _status(port) == 200  # the socket listens before the process runs: the request waits for it
        beside.poll()
    with pytest.raises(ConnectionRefusedError):
        _status(port)
    assert reports == []


def test_a_server_that_dies_is_reported_once_and_the_training_goes_on(tmp_path: Path) -> None:
    reports: list[str] = []
    (tmp_path / "no_run").mkdir()  # the server refuses a folder that is none of a run
    with DashboardProcess(listen(0), tmp_path / "no_run", reports.append) as beside:
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            beside.poll()
            time.sleep(0.05)
        beside.poll()
    assert len(reports) == 1 and "the training goes on" in reports[0]


def test_a_port_in_use_is_refused_before_anything_is_prepared() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = RunConfig(dashboard=other.getsockname()[1])
        with pytest.raises(ConfigError, match="is in use"), RunDisplay(Console(quiet=True), config):
            pytest.fail("the run has begun")


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="dashboard = 70000 must be a port"):
        RunConfig(dashboard=70_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is not a run folder, nor a folder of runs: there is no such folder"),
        (["."], "no folder in it has events.jsonl or config.toml"),
        (["run", "--port", "99999"], "dashboard port 99999"),
        (["run", "--host", "no such host"], "no address of this machine"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        write_run(tmp_path / "run", [])
    assert run_command(["dashboard", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None if name == "plotly" else object())
    with pytest.raises(ConfigError, match=r"needs plotly: in a clone of diloco, .*pip install .* '\.\[dashboard\]'"):
        process.check_installed()
