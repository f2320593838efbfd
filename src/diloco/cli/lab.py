"""`diloco lab`: the papers' tables and figures on one device, and experiments of one's own."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco.errors import ConfigError
from diloco.lab import commands
from diloco.lab.commands import print_line
from diloco.lab.run_options import RunOptions, ScaleName


def list_experiments(*, scale: ScaleName = "cpu") -> None:
    """List the experiments.

    Parameters
    ----------
    scale
        smoke: does it run; cpu: small runs; gpu: three seconds an arm on a large GPU; 1m, 4m, 14m: by model size.
    """
    commands.list_experiments(scale, print_line)


def run(
    *experiments: str,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    options: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),  # noqa: B008 - frozen
) -> None:
    """Run the arms of experiments that are not finished; the same command continues after an interruption.

    Parameters
    ----------
    experiments
        Names (diloco lab list), or files of your own (diloco lab new).
    everything
        All experiments, the most important first.
    """
    commands.run(commands.find_experiments(experiments, everything), options, print_line)


def tune(
    *experiments: str,
    options: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),  # noqa: B008 - frozen
) -> None:
    """Search the rates of experiments' methods, for both sides, and print all candidates, the best first.

    Parameters
    ----------
    experiments
        Those that have something to tune: t2, f6, f9, eager, muon, regime. Each begins with what the ones before found.
    """
    commands.tune(commands.find_experiments(experiments, False), options, print_line)


def report(folder: Path, /, *experiments: str, to: Path | None = None) -> None:
    """Write report.html and report.md: tables, figures, and a verdict for each published claim.

    Parameters
    ----------
    folder
        The folder of `diloco lab run`.
    experiments
        Only these, or files of your own (default: all of the laboratory's).
    to
        Another folder for the report.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: diloco lab run … --out {folder} makes it")
    commands.report(folder, experiments, to, print_line)


def new(name: str, /) -> None:
    """Write a file with an experiment of your own, ready to run.

    Parameters
    ----------
    name
        Of the experiment and its file: letters, digits and _.
    """
    commands.write_new_experiment(name, print_line)
