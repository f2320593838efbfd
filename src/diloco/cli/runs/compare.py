"""`diloco compare RUN RUN…`: runs side by side, with the gap in perplexity and the reduction in bytes as they are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.display.comparison import ComparedRun, as_csv, as_json, default_reference, names_of, savings, tables
from diloco.cli.runs.plot import check_figure, write_figure
from diloco.errors import ConfigError
from diloco.plots.panels import PALETTE, Panel, Series
from diloco.plots.runs import panels_of, read_run
from diloco.training.config.run_file import read_run_file
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import read_summary

_LOSSES = ("steps", "tokens", "bytes", "time")


def compare(
    *runs: Path,
    against: Annotated[Path | None, Parameter(name="--against")] = None,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    csv: Annotated[bool, Parameter(name="--csv")] = False,
    plot: Path | None = None,
) -> None:
    """Put runs side by side in one table.

    Parameters
    ----------
    runs
        Run folders, two or more.
    against
        The reference run. By default the first data-parallel run, or the first run if there is none.
    json_
        Print the numbers as JSON.
    csv
        Print the numbers as CSV, a line for each run.
    plot
        Also draw the runs over each other: a file that ends in .svg, .png, .pdf or .html.
    """
    if json_ and csv:
        raise ConfigError("--json and --csv are two forms of the same: choose one")
    if plot is not None:
        check_figure(plot)
    folders = list(runs)
    if against is not None and not any(against.absolute() == run.absolute() for run in runs):
        folders.append(against)
    if len(folders) < 2:
        raise ConfigError(f"compare needs at least two run folders, and got {len(folders)}: diloco compare RUN RUN")
    compared = [_read(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    reference = default_reference(compared)
    if against is not None:
        reference = next(run for run in compared if run.folder.absolute() == against.absolute())
    if plot is not None:
        write_figure(plot, compared_panels(compared), ", ".join(run.name for run in compared))
    console = Console()
    try:
        if json_:
            print(json.dumps(as_json(compared, reference), indent=2))
        elif csv:
            print(as_csv(compared, reference), end="")
        else:
            console.print(*tables(compared, reference, console.width), sep="\n")
            for sentence in filter(None, (savings(run, reference) for run in compared)):
                console.print(Text(sentence), soft_wrap=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"a summary.json of these runs has a value that cannot be compared: {error}") from error


def _read(folder: Path, name: str) -> ComparedRun:
    summary = read_summary(folder)
    file = folder / RUN_FILE
    return ComparedRun(name, folder, summary, read_run_file(file) if file.is_file() else {})


def compared_panels(runs: Sequence[ComparedRun]) -> list[Panel]:
    """Return the figure of `--plot`: losses over each other, and the last perplexity and bytes as bars."""
    panels = panels_of([read_run(run.folder, run.name) for run in runs], _LOSSES)
    bars = {"Validation perplexity": "validation_perplexity", "Bytes sent by a worker": "bytes_sent_per_worker"}
    for title, key in bars.items():
        series = [
            Series(run.name, [run.name], [run.summary[key]], color=PALETTE[number % len(PALETTE)])
            for number, run in enumerate(runs)
        ]
        panels.append(Panel(title, "", title.lower(), series, kind="bar"))
    return panels
