"""`diloco compare RUN RUN…`: runs side by side, with the gap in perplexity and the reduction in bytes as they are."""

from pathlib import Path

from rich.console import Console

from diloco.cli.display.report import comparison
from diloco.errors import ConfigError
from diloco.training.records.summary import read_summary


def compare(*runs: Path) -> None:
    """Put runs side by side in one table.

    The first data-parallel run is the reference, or the first run if there is none.
    Example:  diloco compare runs/diloco runs/data-parallel

    Parameters
    ----------
    runs
        Run folders, two or more.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs at least two run folders, and got {len(runs)}: diloco compare RUN RUN")
    summaries = [(run.name, read_summary(run)) for run in runs]
    try:
        table = comparison(summaries)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"a summary.json of these runs has a value that cannot be compared: {error}") from error
    Console().print(table)
