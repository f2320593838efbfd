"""`diloco plot` and `diloco compare --plot`: what is drawn is what the events say, and bad input is named."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.cli.main import run
from diloco.errors import ConfigError
from diloco.history.log import EVENTS_FILE
from diloco.plots.panels import Panel, Series
from diloco.plots.runs import PANELS, PlottedRun, panels_of, read_run
from support.event_log import Event, history_of
from support.recorded_runs import RUN, append, event, merged, run_folder, started, step, validation


def by_label(panel: Panel) -> dict[str, Series]:
    return {series.label: series for series in panel.series}


def only(name: str, *runs: PlottedRun, **options: int) -> Panel:
    (panel,) = panels_of(runs, [name], **options)
    return panel


def plotted(name: str, events: Sequence[Event]) -> PlottedRun:
    return PlottedRun(name, history_of(events))


MINE, OTHER = plotted("mine", RUN), plotted("other", RUN[:5])


def test_the_loss_is_the_mean_of_the_workers_in_a_band_of_them() -> None:
    training = by_label(only("steps", MINE))["training"]
    assert (training.x, training.y) == ([10, 20], [4.5, 3.25])
    assert (training.low, training.high) == ([4.0, 3.0], [5.0, 3.5])
    for name, x in (("tokens", [2000, 4000]), ("bytes", [50, 100]), ("time", [1.0, 2.0])):
        assert by_label(only(name, MINE))["training"].x == x


def test_validations_are_points_at_their_step() -> None:
    points = by_label(only("steps", MINE))["validation"]
    assert list(zip(points.x, points.y, strict=True)) == [(0, 6.0), (10, 3.0)]
    between = plotted("between", [*RUN, validation(15, 2.0)])
    assert by_label(only("tokens", between))["validation"].x[-1] == 3000
    assert by_label(only("bytes", between))["validation"].x[-1] == 100  # sent by the next logged step


def test_several_runs_are_drawn_over_each_other_under_their_names() -> None:
    labels = by_label(only("steps", MINE, OTHER)).keys()
    assert labels == {"mine", "mine, validation", "other", "other, validation"}


def test_bytes_that_differ_much_are_on_a_logarithmic_axis() -> None:
    much = plotted(
        "much", [one | {"bytes_sent": one["bytes_sent"] * 100} if one["type"] == "step" else one for one in RUN]
    )
    assert only("bytes", MINE, much).x_log and not only("tokens", MINE, much).x_log
    assert not only("bytes", MINE).x_log and not only("bytes", MINE, OTHER).x_log
    assert by_label(only("bytes", MINE))["validation"].x[0] == 0


def test_gaps_and_nan_are_gaps() -> None:
    gone = plotted("gone", [step(0, 10, None), step(0, 20, 2.0)])
    assert by_label(only("steps", gone))["training"].y == [None, 2.0]


def test_smoothing_keeps_the_single_values_faint_behind() -> None:
    raw, smooth = (series for series in only("steps", MINE, smooth=2).series if series.label == "training")
    assert raw.faint and raw.y == [4.5, 3.25]
    assert not smooth.faint and smooth.y == [4.5, (4.5 + 3.25) / 2]


def test_very_many_steps_are_drawn_as_few_points_with_their_extremes() -> None:
    losses = [9.0 if number == 1 else 1.0 for number in range(5000)]
    training = by_label(only("steps", plotted("long", [step(0, n + 1, one) for n, one in enumerate(losses)])))[
        "training"
    ]
    assert len(training.x) <= 2000 and training.x[-1] == 5000
    assert training.high is not None and training.high[0] == 9.0


def test_norms_and_cosines_are_those_of_the_rounds() -> None:
    pairs = [[0, 1, 0.5], [0, 2, 0.1], [1, 2, 0.3]]
    compared = {"cosines": pairs, "similarity": 0.3}
    one = plotted("one", [*RUN[:5], merged(0, 0, 10, **compared), merged(1, 0, 10, **compared)])
    (cosine,) = only("cosines", one).series
    assert (cosine.x, cosine.y) == ([10], [0.3])
    assert cosine.low is not None and cosine.high is not None and (cosine.low[0], cosine.high[0]) == (0.1, 0.5)
    norms = by_label(only("norms", one))
    assert norms["of a worker"].y == [2.5] and norms["of the mean"].y == [0.5]


def test_the_waterfall_has_a_row_for_each_worker() -> None:
    posts = [event("round_posted", worker, sequence=1, step=20) | {"time": 1019.0} for worker in (0, 1)]
    panel = only("rounds", plotted("one", [*RUN[:9], *posts, *RUN[9:]]), rounds=1)
    assert panel.kind == "spans" and panel.rows == ["worker 0", "worker 1"] and "1" in panel.title
    assert {series.label for series in panel.series} <= {"compute", "encode", "send", "wait", "reduce", "merge"}


def test_a_failed_round_is_seen_in_the_waterfall() -> None:
    nothing = {"mean_norm": None, "failure": "worker 1 was late", "contributors": [], "waited_seconds": 5.0}
    posted = event("round_posted", 0, sequence=2, step=30) | {"time": 1031.0}
    failed = merged(0, 2, 30, **nothing) | {"time": 1036.0}
    panel = only("rounds", plotted("one", [*RUN, posted, failed]), rounds=1)
    (wait,) = (series for series in panel.series if series.label == "failed round")
    assert wait.until is not None and wait.until[0] - wait.x[0] == pytest.approx(5.0)  # type: ignore[operator]


def test_without_names_a_figure_has_what_the_runs_have() -> None:
    baseline = plotted("baseline", [started(0), step(0, 10, 4.0)])
    assert [panel.title for panel in panels_of([baseline])] == [
        *(f"Loss over {name}" for name in ("steps", "tokens", "bytes", "time")), "Compute utilisation",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'rounds' shows rounds, and baseline has none"):
        panels_of([baseline], ["rounds"])
    with pytest.raises(ConfigError, match=r"no panel 'loss': choose of steps, tokens"):
        panels_of([baseline], ["loss"])


def test_folders_that_cannot_be_plotted_are_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_run(tmp_path / "none", "none")
    with pytest.raises(ConfigError, match=f"it has no {EVENTS_FILE}"):
        read_run(tmp_path, "empty")
    append(tmp_path, [started(0)])
    with pytest.raises(ConfigError, match="has no steps yet"):
        read_run(tmp_path, "young")
    append(tmp_path, [step(0, 10, 4.0) | {"v": 9}])
    with pytest.raises(ConfigError, match="newer version of diloco"):
        read_run(tmp_path, "newer")


def test_a_log_with_lines_that_are_no_events_is_plotted(tmp_path: Path) -> None:
    with (tmp_path / EVENTS_FILE).open("w") as file:
        file.write('[]\n{"type": 3}\n{"type": "step"}\n"text"\n')
    odd = [step(0, 10, 4.0) | {"step": "ten"}, merged(0, 0, 10) | {"sequence": None}, event("resumed")]
    strange = {"loss": "low", "tokens": [], "elapsed_seconds": None, "bytes_sent": {}}
    append(tmp_path, [*odd, step(0, 30, None) | strange, merged(0, 3, 30, norm="x", waited_seconds="y"), *RUN])
    run = read_run(tmp_path, "mine")
    assert {row.step for row in run.steps} == {10, 20, 30}
    assert panels_of([run])


@pytest.mark.parametrize("name", ["plot", "compare"])
def test_the_commands_write_the_file(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = run_folder(tmp_path / "one", RUN), run_folder(tmp_path / "<b>other", RUN)
    figure = tmp_path / "new" / "figure.html"
    options = ["--panels", "steps", "--out"] if name == "plot" else ["--plot"]
    assert run([name, str(one), str(other), *options, str(figure)]) == 0
    page = figure.read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page and "<b>" not in page
    assert "wrote" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "at least one run folder"),
        (["RUN", "--out", "loss.gif"], "must be .svg, .png, .pdf or .html"),
        (["RUN", "--smooth", "0"], "--smooth = 0 must be at least 1"),
        (["RUN", "--panels", ","], "--panels names no panel"),
        (["RUN", "--panels", "steps,loss"], "there is no panel 'loss'"),
        (["RUN/none"], "there is no such folder"),
    ],
)
def test_bad_usage_is_refused(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(tmp_path / "run", RUN)
    assert run(["plot", *(word.replace("RUN", str(folder)) for word in words)]) == 2
    assert reason in capfd.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.glob("*.svg"))


def test_every_panel_has_a_word_in_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    run(["plot", "--help"])
    shown = capfd.readouterr().out
    assert all(name in shown for name in PANELS)
