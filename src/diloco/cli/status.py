"""`diloco status RUN|INVITATION`: who is in a swarm, where each one is, and what it last gave; seen from outside."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.cli.display.view import printable
from diloco.engines.swarm.installed import check_swarm
from diloco.errors import ConfigError, RendezvousError
from diloco.training.processes.run_lock import trains

_COLUMNS = (
    "worker",
    "where",
    "step",
    "behind",
    "steps/s",
    "loss",
    "tokens",
    "last contribution",
    "heard",
    "latency",
    "",
)
_LEFT = ("worker", "where", "")


def status(run: str, /, *, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """Show who is in a swarm: its workers, the round, speed, lag, last contribution.

    Example:  diloco status runs/mine

    Parameters
    ----------
    run
        A run folder of a swarm, or an invitation.
    as_json
        For programs: everything that is known, as JSON.
    """
    check_swarm()
    from diloco.engines.swarm.node.guest import Guest

    folder = Path(run) if len(run) < 256 and Path(run).exists() else None  # an invitation is longer
    try:
        with Guest(_invitation(run, folder)) as guest:
            told = guest.status()
    except RendezvousError as error:
        if folder is None:
            raise
        here = "its workers here do not answer" if trains(folder) else "no worker of it runs on this machine"
        raise RendezvousError(f"{here}, and {error}") from error
    if as_json:
        print(json.dumps(told, indent=1))
        return
    console = Console()
    console.print(Text(printable(headline(told))), soft_wrap=True)
    if console.is_terminal:
        console.print(_table(told))
    else:
        for line in lines(told):
            console.print(Text(line), soft_wrap=True)


def _invitation(run: str, folder: Path | None) -> Any:
    """The one given, or that of the run folder with the addresses that are known there."""
    from diloco.engines.swarm.trust import run_owner as inviting
    from diloco.engines.swarm.trust.invitation import Invitation

    if folder is None:
        if "/" in run or run.startswith("."):
            raise ConfigError(f"{run} is not a run folder: there is no such folder; nor is it an invitation")
        return Invitation.parse(run, time.time())
    return inviting.own_invitation(inviting.swarm_folder(folder), time.time())


def headline(told: dict[str, Any]) -> str:
    here = present(told)
    leader = next((str(one["number"]) for one in here if one["peer"] == told["leader"]), "none")
    rounds = sorted(map(int, told["leading"]))
    now = f"round {rounds[0] + 1} in progress ({told['leading'][str(rounds[0])]})" if rounds else "between rounds"
    ended = max((one["ended"] + 1 for one in here), default=0)
    speed = sum(1 / one["step_seconds"] for one in here if one["step_seconds"] > 0)
    workers = "1 worker" if len(here) == 1 else f"{len(here)} workers"
    return (
        f"run {told['run']} · {workers} · {ended} rounds · {now} · {speed:.2f} steps/s in all · led by worker {leader}"
    )


def present(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in told["members"] if one["live"] and one["number"] >= 0]


def rows(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of everyone that is here, or was and may come back; one for each column."""
    first = max((one["position"] for one in present(told)), default=0)
    shown = [one for one in told["members"] if one["number"] >= 0]
    return [
        (
            str(one["number"]),
            printable(f"{one['label'] or '-'} ({one['peer'][-6:]})"),
            str(one["position"]),
            str(first - one["position"]) if one["live"] else "-",
            f"{1 / one['step_seconds']:.2f}" if one["step_seconds"] > 0 else "-",
            f"{one['loss']:.3f}" if one["loss"] >= 0 else "-",
            f"{one['tokens']:,}",
            f"round {one['contributed'] + 1}" if one["contributed"] >= 0 else "none yet",
            f"{one['silent_seconds']:.1f} s ago" if _was_heard(one) else "never",
            f"{1000 * one['latency_seconds']:.0f} ms" if one["latency_seconds"] else "-",
            _state(one),
        )
        for one in shown
    ]


def _was_heard(one: dict[str, Any]) -> bool:
    """Others may have told of it only: then nothing but its number is known."""
    return bool(one["live"] or one["left"] or one["label"] or one["position"])


def _state(one: dict[str, Any]) -> str:
    if one["left"]:
        return "left"
    if not _was_heard(one):
        return "not met"
    if not one["live"]:
        return "lost"
    return "training" if one["holds"] else "receiving the state"


def lines(told: dict[str, Any]) -> list[str]:
    return ["  ".join(f"{name} {cell}".strip() for name, cell in zip(_COLUMNS, row, strict=True)) for row in rows(told)]


def _table(told: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows(told):
        table.add_row(*row)
    return table
