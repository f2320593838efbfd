"""Every reader of a run shows each number that ROUND_STATISTICS names, without a line for it in any of them."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli.display.live import RunView, render
from diloco.cli.display.report import print_report
from diloco.core.config import SyncConfig
from diloco.dashboard.metrics import exposition
from diloco.dashboard.series import series
from diloco.dashboard.snapshot import snapshot
from diloco.history.events import ROUND_STATISTICS, RoundEndedEvent, read_event
from diloco.history.figures import RunFigures
from diloco.history.run_history import RunHistory, read_history
from diloco.outer.rounds import RoundEvent
from diloco.plots.runs import panels_of, read_run
from diloco.sinks.follower import points_of
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import write_summary
from support.dashboard_runs import append, round_events, started, step
from support.event_log import history_of

CONFIG = RunConfig(workers=2, sync=SyncConfig(num_inner_steps=20, codec="int8"))
NAMES = list(ROUND_STATISTICS)
VALUES = {name: 0.25 + place for place, name in enumerate(NAMES)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    told = [event | VALUES if event["type"] == "round" else event for event in round_events(0, 2, 20)]
    append(tmp_path, *(started(worker, 2) for worker in (0, 1)), *(step(worker, 20) for worker in (0, 1)), *told)
    return tmp_path


def _printed(shown: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_statistic_is_made_with_every_round(name: str) -> None:
    assert hasattr(RoundEvent, name) or name in RoundEvent.__dataclass_fields__


@pytest.mark.parametrize("name", NAMES)
def test_terminal_and_report_show_a_statistic_that_is_brief(name: str, folder: Path) -> None:
    statistic = ROUND_STATISTICS[name]
    live = _printed(render(RunView(CONFIG, read_history(folder))))
    report = Console(file=io.StringIO(), width=200)
    print_report(report, folder, write_summary(folder, CONFIG))
    assert isinstance(report.file, io.StringIO)
    for shown in (live, report.file.getvalue()):
        assert (statistic.text(VALUES[name]) in shown) == statistic.brief


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_a_statistic_of_the_last_round_and_over_the_run(name: str, folder: Path) -> None:
    figures = RunFigures(read_history(folder))
    assert ROUND_STATISTICS[name].text(VALUES[name]) in snapshot(figures, {}, None, 0.0)["rounds"]["last_statistics"]
    curves = series(figures, 100)
    (column,) = [one["column"] for one in curves["statistics"] if one["meaning"] == ROUND_STATISTICS[name].meaning]
    assert curves["rounds"][column] == [VALUES[name]]


@pytest.mark.parametrize("name", NAMES)
def test_metrics_sinks_and_plots_have_every_statistic(name: str, folder: Path) -> None:
    history = read_history(folder)
    state = {"run": "run", **snapshot(RunFigures(history), {}, None, 0.0)}
    assert f'diloco_round_{name}{{run="run"}} {VALUES[name]}' in exposition([state])
    event = RoundEndedEvent(sequence=0, worker=0, **VALUES)  # type: ignore[arg-type]
    assert (f"round/{name}", VALUES[name]) in [(point.name, point.value) for point in points_of(event, history)]
    drawn = [value for panel in panels_of([read_run(folder, "run")]) for one in panel.series for value in one.y]
    assert VALUES[name] in drawn


@pytest.mark.parametrize("late", [0, 1], ids=["tells first", "tells last"])
def test_a_sink_has_each_number_of_a_round_once_whoever_tells_it_first(late: int) -> None:
    events = [*(started(worker, 2) for worker in (0, 1)), *round_events(0, 2, 20)]
    nothing = {"similarity": None, "codec_error": None, "cosines": []}
    history = RunHistory()
    points = []
    for told in events:
        event = read_event(told | nothing if told["type"] == "round" and told["worker"] == late else told)
        history.update(event)
        points += [(point.name, point.value) for point in points_of(event, history) if point.worker is None]
    for name in ("similarity", "mean_norm", "seconds"):
        assert [value for point, value in points if point == f"round/{name}"] == [{"mean_norm": 1.5}.get(name, 0.5)]


@pytest.mark.parametrize("late", [0, 1], ids=["tells first", "tells last"])
def test_a_worker_that_got_the_mean_afterwards_takes_no_number_of_the_round_away(late: int) -> None:
    events = [*(started(worker, 2) for worker in (0, 1)), *round_events(0, 2, 20)]
    nothing = {"similarity": None, "codec_error": None, "cosines": []}
    told = [one | nothing if one["type"] == "round" and one["worker"] == late else one for one in events]
    round_ = history_of(told).rounds.by_sequence[0]
    assert round_.statistics["similarity"] == 0.5 and round_.statistics["codec_error"] == 2e-4
    assert round_.cosines == [[0, 1, 0.5]] and (round_.pairs, round_.cosine_low, round_.cosine_high) == (1, 0.5, 0.5)
