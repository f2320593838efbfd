"""`diloco invite RUN` and `diloco revoke RUN PEER`: who may come into a swarm, and who must go."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.errors import ConfigError
from diloco.training.processes.run_lock import trains


def invite(run: Path, /, *, days: float | None = None, fresh: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Print an invitation to a run: whoever has it can join, until it expires.

    On the machine where the run began it is a new one; elsewhere it is the one
    that this machine came with. Either way with the addresses known now.
    Example:  diloco invite runs/mine --days 7

    Parameters
    ----------
    run
        A run folder of a swarm.
    days
        How long it is good for; 30 if left out. Only where the run began.
    fresh
        A new one or none: fails where the run did not begin.
    """
    from diloco.engines.swarm.trust import run_owner as inviting

    folder = inviting.swarm_folder(run)
    if inviting.may_invite(folder):
        made = inviting.new_invitation(folder, inviting.DAYS if days is None else days, time.time())
        _say(f"a new invitation to the run {made.run_id}, valid until {made.until}")
    elif days is not None or fresh:
        option = "--days" if days is not None else "--fresh"
        raise ConfigError(
            f"{option}: new invitations are made only on the machine where the run began, and {folder} has no run.key; "
            "without it, this machine's own invitation is printed again"
        )
    else:
        made = inviting.own_invitation(folder, time.time())
        _say(f"the invitation that this machine came with, to the run {made.run_id}, valid until {made.until}")
    if not trains(run):
        _say("no worker of it runs here now: the addresses in it are those last known")
    _say("on another machine:  diloco join INVITATION")
    print(made.text())


def revoke(run: Path, peer: str, /) -> None:
    """Take a peer out of a run, and its invitation with it. For ever.

    Others who came with that invitation stay; nobody else can use it any more.
    Only on the machine where the run began.
    Example:  diloco revoke runs/mine 3

    Parameters
    ----------
    run
        A run folder of a swarm.
    peer
        A worker's number, or its peer id, or the beginning or end of it.
    """
    from diloco.engines.swarm.trust import run_owner as inviting

    done = inviting.revoke(inviting.swarm_folder(run), peer, time.time())
    record = done.record
    _say(f"{done.peer} is revoked" if done.news else f"{done.peer} was revoked already")
    if record.invitation is None:
        _say("with which invitation it came is not known here: while that is valid, it can come under another name")
    else:
        _say(f"so is the invitation {record.invitation}; of those who came with it, {len(record.kept)} stay")
        _say(f"for new workers:  diloco invite {run}")
    if done.renewed is not None:
        _say("this machine's own workers came with it too: the next ones come with a new one")
    if trains(run):
        _say("the worker here passes it on to the others")
    else:
        _say("no worker runs here now: the others learn of it when one is started (diloco train --resume)")


def _say(line: str) -> None:
    """Beside the result, which alone goes to standard output."""
    Console(stderr=True).print(Text(line), soft_wrap=True)
