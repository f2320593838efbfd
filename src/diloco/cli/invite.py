"""`diloco invite RUN` and `diloco revoke RUN PEER`: let a machine into a swarm, and exclude one."""

import shlex
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.engines.swarm.installed import check_swarm
from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.training.processes.run_lock import is_training
from diloco.training.records.run_description import RUN_JSON
from diloco.training.records.run_folder import resume_command


def invite(
    run: Path,
    /,
    *,
    seats: int | None = None,
    days: float | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Print an invitation to a run: as many workers can join with it as it has seats, until it expires.

    On the machine where the run began it is a new invitation; elsewhere it is
    the one that this machine came with. It has the addresses known now.
    Example:  diloco invite runs/mine --seats 4 --days 7

    Parameters
    ----------
    run
        A run folder of a swarm.
    seats
        How many workers can join with a new invitation; 1 if left out. A worker that returns needs no other one.
    days
        How long a new invitation is valid; 30 if left out.
    fresh
        Fail if this machine cannot make a new invitation.
    """
    check_swarm()
    from diloco.engines.swarm.trust import run_owner

    folder = run_owner.swarm_folder(run)
    if run_owner.may_invite(folder):
        given = (run_owner.DAYS if days is None else days, time.time(), 1 if seats is None else seats)
        made = run_owner.new_invitation(folder, *given)
        _say(f"a new invitation to the run {made.run_id} for {_workers(made.seats)}, valid until {made.until}")
    elif days is not None or seats is not None or fresh:
        option = "--seats" if seats is not None else "--days" if days is not None else "--fresh"
        raise ConfigError(
            f"{option}: only the machine where the run began makes new invitations, and {folder} has no run.key; "
            f"without {option}, the invitation that this machine came with is printed"
        )
    else:
        made = run_owner.own_invitation(folder, time.time())
        _say(
            f"the invitation that this machine came with, to the run {made.run_id} for {_workers(made.seats)} in all, "
            f"valid until {made.until}"
        )
    if not is_training(run):
        _say("no worker of this run is running here: the invitation has the addresses last known")
    own_loop = not (folder / RUN_JSON).exists()  # `diloco join` has nothing to run then
    how = 'diloco.join_swarm(FOLDER, "INVITATION") in your loop' if own_loop else command("join", "INVITATION")
    _say(f"on another machine:  {how}")
    print(made.text())


def revoke(run: Path, peer: str, /) -> None:
    """Exclude a peer from a run for ever, and its invitation with it.

    Other peers that came with that invitation stay; no new peer can use it.
    Works only on the machine where the run began.
    Example:  diloco revoke runs/mine 3

    Parameters
    ----------
    run
        A run folder of a swarm.
    peer
        A worker's number, its peer id, or a beginning or end of the id.
    """
    check_swarm()
    from diloco.engines.swarm.trust import run_owner

    done = run_owner.revoke(run_owner.swarm_folder(run), peer, time.time())
    record = done.record
    _say(f"{done.peer} is revoked" if done.is_new else f"{done.peer} was revoked already")
    if record.invitation is None:
        _say("its invitation is not known here: until that expires, the peer can come back under a new id")
    else:
        others = {0: "no other peer uses it", 1: "the other peer that came with it stays"}
        several = f"the {done.staying} other peers that came with it stay"
        _say(f"so is the invitation {record.invitation}; {others.get(done.staying, several)}")
        _say(f"for new workers:  {command('invite', shlex.quote(str(run)))}")
    if done.renewed is not None:
        _say("this machine's own workers came with it too: those that start later use a new one")
    if is_training(run):
        _say("the worker that runs here passes it on to the others")
    else:
        _say(f"no worker runs here: start one to tell the others ({resume_command(run)})")


def _workers(seats: int) -> str:
    return "1 worker" if seats == 1 else f"{seats} workers"


def _say(line: str) -> None:
    """On standard error: only the result goes to standard output."""
    Console(stderr=True).print(Text(line), soft_wrap=True)
