"""`diloco lab`: the papers' tables and figures on one device, and experiments of one's own."""

import math
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco.errors import ConfigError
from diloco.lab import commands
from diloco.lab.runs import STDLIB, print_line

ScaleName = Literal["smoke", "cpu", "gpu"]


def list_experiments(*, scale: ScaleName = "cpu") -> None:
    """List the experiments.

    Parameters
    ----------
    scale
        smoke: does it run; cpu: small runs, rates not tuned; gpu: ten seconds an arm on a large GPU.
    """
    commands.list_experiments(scale, print_line)


def run(
    *experiments: str,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    scale: ScaleName = "smoke",
    seeds: int = 3,
    out: Path | None = None,
    device: str = "auto",
    text: str = STDLIB,
    domains: str = STDLIB,
    seconds: float = math.inf,
    processes: int = 1,
    how: str = "auto",
) -> None:
    """Run the arms of experiments that are not finished; the same command continues after an interruption.

    Parameters
    ----------
    experiments
        Names (diloco lab list), or files of your own (diloco lab new).
    everything
        All experiments, the most important first.
    scale
        smoke: does it run; cpu: small runs, rates not tuned; gpu: ten seconds an arm on a large GPU.
    seeds
        Seeds 0 to N − 1; a verdict needs three.
    out
        The folder of results (default: runs/lab-SCALE).
    device
        cpu, cuda, or auto: a GPU if there is one.
    text
        Any data.source, or the folder of a prepared corpus.
    domains
        The same for workers that read different texts; its files or labels are the shards.
    seconds
        Begin no arm after this many.
    processes
        Arms at a time.
    how
        How replicas are computed: sequential, stacked, "stacked N", or auto: what is faster.
    """
    commands.run(
        commands.chosen(experiments, everything), scale, seeds, out or Path(f"runs/lab-{scale}"), print_line,
        device=device, text=text, domains=domains, seconds=seconds, processes=processes, how=how,
    )  # fmt: skip


def tune(
    experiment: str,
    /,
    *,
    scale: ScaleName = "cpu",
    seeds: int = 1,
    out: Path | None = None,
    device: str = "auto",
    text: str = STDLIB,
    domains: str = STDLIB,
    seconds: float = math.inf,
    processes: int = 1,
    how: str = "auto",
) -> None:
    """Run the candidates for an experiment's rates and print the best of each group, for both sides.

    Parameters
    ----------
    experiment
        One that has candidates: t2, f6, f9, muon, equal_tokens.
    scale
        smoke, cpu or gpu.
    seeds
        Seeds of each candidate.
    out
        The folder of results (default: runs/lab-SCALE, shared with run).
    device
        cpu, cuda, or auto.
    text
        As for run.
    domains
        As for run.
    seconds
        Begin no arm after this many.
    processes
        Arms at a time.
    how
        How replicas are computed: sequential, stacked, "stacked N", or auto: what is faster.
    """
    commands.tune(
        commands.chosen([experiment], False)[0], scale, seeds, out or Path(f"runs/lab-{scale}"), print_line,
        device=device, text=text, domains=domains, seconds=seconds, processes=processes, how=how,
    )  # fmt: skip


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
    commands.new(name, print_line)
