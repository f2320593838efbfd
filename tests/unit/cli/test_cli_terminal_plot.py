"""The small plot at the end of a run: eight lines that fit, in characters that the terminal has."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli.display.report import print_report
from diloco.cli.display.terminal_plot import loss_plot
from diloco.training.records.summary import read_summary
from support.event_log import Event, history_of
from support.recorded_runs import RUN, run_folder, started, step, validation


class _File(io.StringIO):
    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def console(width: int = 80, encoding: str = "utf-8") -> Console:
    return Console(file=_File(encoding), width=width)


def lines(events: list[Event], on: Console) -> list[str]:
    plot = loss_plot(history_of(events), on)
    assert plot is not None
    return plot.plain.split("\n")


FALLING = [started(0), validation(0, 8.0), *(step(0, n, 8 - n / 20) for n in range(1, 121)), validation(120, 2.0)]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize("width", [50, 80, 120, 300])
def test_the_plot_has_eight_lines_and_fits(width: int) -> None:
    shown = lines(FALLING, console(width))
    assert len(shown) == 8 and all(len(line) <= width for line in shown)
    assert shown[0].startswith("     8 ") and shown[5].startswith("     2 ") and shown[-1].endswith("step 120")


def test_a_falling_loss_goes_from_the_upper_left_to_the_lower_right() -> None:
    shown = lines(FALLING, console())
    first = [min(at for at, sign in enumerate(line) if 0x2800 < ord(sign) < 0x2900) for line in shown[:6]]
    assert first == sorted(first) and len(set(first)) == 6
    assert shown[0][8] == "●" and shown[5][-1] == "●"


@pytest.mark.parametrize(("encoding", "terminal"), [("ascii", "xterm"), ("latin-1", "xterm"), ("utf-8", "linux")])
def test_plain_characters_where_the_encoding_or_the_terminal_has_no_others(
    encoding: str, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    shown = "\n".join(lines(FALLING, console(encoding=encoding)))
    assert shown.isascii() and "o" in shown and "." in shown


def test_there_is_no_plot_of_less_than_two_steps_or_in_a_narrow_terminal() -> None:
    assert loss_plot(history_of([started(0), validation(0, 8.0), step(0, 10, 4.0)]), console()) is None
    assert loss_plot(history_of([step(0, 10, None), step(0, 20, None)]), console()) is None
    assert loss_plot(history_of(FALLING), console(40)) is None


def test_a_loss_that_stays_the_same_or_is_missing_at_times_is_drawn() -> None:
    shown = lines([step(0, 10, 4.0), step(0, 20, None), step(0, 30, 4.0)], console())
    assert len(shown) == 8


def test_a_run_ends_with_its_plot(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", RUN)
    on = console()
    print_report(on, folder, read_summary(folder))
    shown = on.file.getvalue()  # type: ignore[attr-defined]
    assert "⠒⠒ training   ● validation" in shown and "step 20" in shown
