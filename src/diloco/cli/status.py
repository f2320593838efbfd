"""`diloco status RUN|INVITATION`: the workers of a swarm, their progress and speed, asked for over the network."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.cli.display.notes import printable
from diloco.engines.swarm.installed import check_swarm
from diloco.errors import ConfigError, RendezvousError
from diloco.training.processes.run_lock import is_training

if TYPE_CHECKING:
    from diloco.engines.swarm.node.status import MemberStatus, RunStatus

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
    """Show the workers of a swarm: round, speed, lag, last contribution.

    Example:  diloco status runs/mine

    Parameters
    ----------
    run
        A run folder of a swarm, or an invitation.
    as_json
        Print everything that is known, as JSON.
    """
    check_swarm()
    from msgspec import to_builtins

    from diloco.engines.swarm.node.guest import Guest

    folder = Path(run) if len(run) < 256 and Path(run).exists() else None  # an invitation is longer
    try:
        with Guest(_invitation(run, folder)) as guest:
            swarm = guest.status()
    except RendezvousError as error:
        if folder is None:
            raise
        here = "its workers here do not answer" if is_training(folder) else "none of its workers runs on this machine"
        raise RendezvousError(f"{here}, and {error}") from error
    if as_json:
        print(json.dumps(to_builtins(swarm), indent=1))
        return
    console = Console()
    console.print(Text(printable(headline(swarm))), soft_wrap=True)
    if console.is_terminal:
        console.print(_table(swarm))
    else:
        for line in lines(swarm):
            console.print(Text(line), soft_wrap=True)


def _invitation(run: str, folder: Path | None) -> Any:
    """The invitation given, or the one of the run folder with the addresses that are known there."""
    from diloco.engines.swarm.trust import run_owner
    from diloco.engines.swarm.trust.invitation import Invitation

    if folder is None:
        if "/" in run or run.startswith("."):
            raise ConfigError(f"{run} is not a run folder: there is no such folder, and it is not an invitation")
        return Invitation.parse(run, time.time())
    return run_owner.own_invitation(run_owner.swarm_folder(folder), time.time())


def headline(swarm: "RunStatus") -> str:
    live = live_workers(swarm)
    leader = next((str(one.number) for one in live if one.peer == swarm.leader), "none")
    rounds = sorted(map(int, swarm.leading))
    now = f"round {rounds[0] + 1} in progress ({swarm.leading[str(rounds[0])]})" if rounds else "between rounds"
    ended = max((one.ended_round + 1 for one in live), default=0)
    speed = sum(1 / one.step_seconds for one in live if one.step_seconds > 0)
    workers = "1 worker" if len(live) == 1 else f"{len(live)} workers"
    return f"run {swarm.run} · {workers} · {ended} rounds · {now} · {speed:.2f} steps/s in all · led by worker {leader}"


def live_workers(swarm: "RunStatus") -> "list[MemberStatus]":
    return [one for one in swarm.members if one.live and one.number >= 0]


def rows(swarm: "RunStatus") -> list[tuple[str, ...]]:
    """One row for each worker that is here, or was and may come back."""
    first = max((one.position for one in live_workers(swarm)), default=0)
    shown = [one for one in swarm.members if one.number >= 0]
    return [
        (
            str(one.number),
            printable(f"{one.label or '-'} ({one.peer[-6:]})"),
            str(one.position),
            str(first - one.position) if one.live else "-",
            f"{1 / one.step_seconds:.2f}" if one.step_seconds > 0 else "-",
            f"{one.loss:.3f}" if one.loss >= 0 else "-",
            f"{one.tokens:,}",
            f"round {one.contributed_round + 1}" if one.contributed_round >= 0 else "none yet",
            f"{one.silent_seconds:.1f} s ago" if _was_heard(one) else "never",
            f"{1000 * one.latency_seconds:.0f} ms" if one.latency_seconds else "-",
            _state(one),
        )
        for one in shown
    ]


def _was_heard(one: "MemberStatus") -> bool:
    """False if this worker is known only from others: then nothing but its number is known."""
    return bool(one.live or one.left or one.label or one.position)


def _state(one: "MemberStatus") -> str:
    if one.left:
        return "left"
    if not _was_heard(one):
        return "not met"
    if not one.live:
        return "lost"
    return "training" if one.has_state else "receiving the state"


def lines(swarm: "RunStatus") -> list[str]:
    return [
        "  ".join(f"{name} {cell}".strip() for name, cell in zip(_COLUMNS, row, strict=True)) for row in rows(swarm)
    ]


def _table(swarm: "RunStatus") -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows(swarm):
        table.add_row(*row)
    return table
