"""`diloco plot RUN…`: figures of one run or of several, from their events."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.display.comparison import names_of
from diloco.errors import ConfigError
from diloco.plots.figures import check_installed, check_path, draw, save
from diloco.plots.panels import Panel
from diloco.plots.runs import panels_of, read_run

_OUT = Path("plots.svg")


def plot(
    *runs: Path,
    out: Path = _OUT,
    panels: Annotated[str | None, Parameter(name="--panels")] = None,
    smooth: int = 1,
    rounds: int = 6,
    columns: int = 2,
) -> None:
    """Draw the loss over steps, tokens, bytes and time, the rounds, utilisation, and the numbers of the rounds.

    Parameters
    ----------
    runs
        Run folders; several are drawn over each other.
    out
        The file: .svg, .png, .pdf or .html.
    panels
        Some of steps, tokens, bytes, time, rounds, utilisation, cosines, norms,
        statistics, with commas. All by default.
    smooth
        Draw the mean of so many logged steps, with the single ones faint behind it.
    rounds
        How many of the last rounds the waterfall shows.
    columns
        Panels beside each other.
    """
    if not runs:
        raise ConfigError("plot needs at least one run folder: diloco plot RUN")
    for name, value in (("smooth", smooth), ("rounds", rounds), ("columns", columns)):
        if value < 1:
            raise ConfigError(f"--{name} = {value} must be at least 1")
    check_figure(out)
    read = [read_run(folder, name) for folder, name in zip(runs, names_of(list(runs)), strict=True)]
    chosen = None if panels is None else [name.strip() for name in panels.split(",") if name.strip()]
    if chosen == []:
        raise ConfigError("--panels names no panel: leave it out for all of them")
    write_figure(
        out, panels_of(read, chosen, smooth=smooth, rounds=rounds), ", ".join(run.name for run in read), columns
    )


def check_figure(out: Path) -> None:
    """Raise ConfigError if no such figure can be written, before anything is read."""
    check_path(out)
    check_installed()


def write_figure(out: Path, panels: Sequence[Panel], title: str, columns: int = 2) -> None:
    try:
        save(draw(panels, columns), out, title=title)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    Console(stderr=True).print(Text(f"wrote {out}"), soft_wrap=True)
