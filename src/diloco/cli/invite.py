"""`diloco invite RUN` and `diloco revoke RUN PEER`: let a machine into a swarm, and exclude one."""

import shlex
import time
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text

from diloco.cli.config_parser import HYPHEN
from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.run_lock import is_training
from diloco.swarm.installed import check_swarm
from diloco.training.records.run_description import RUN_JSON
from diloco.training.records.run_folder import resume_command


def invite(
    run: Path,
    /,
    *,
    seats: int | None = None,
    days: float | None = None,
    renew: Annotated[str | None, HYPHEN] = None,
) -> None:
    """Print a new invitation to a run. One worker can join with it, until it expires.

    Works on the machine where the run began. It has the addresses known now.
    Example:  diloco invite runs/mine --seats 4 --days 7

    Parameters
    ----------
    run
        A run folder of a swarm.
    seats
        How many invitations to print, one a line, each for one worker; 1 if left out.
    days
        How long they are valid; 30 if left out.
    renew
        Print this invitation (`-`, `@FILE` or the word) again with the addresses known now, on any machine of the run.
    """
    check_swarm()
    from diloco.swarm.trust import run_owner
    from diloco.swarm.trust.invitation import read_invitations

    folder = run_owner.swarm_folder(run)
    if renew is not None:
        if seats is not None or days is not None:
            raise ConfigError("--renew changes the addresses of an invitation alone: leave --seats and --days out")
        made = [run_owner.renewed(folder, invitation) for invitation in read_invitations([renew], time.time())]
        what = "with the addresses known now"
    else:
        if not run_owner.may_invite(folder):
            raise ConfigError(
                f"only the machine where the run began makes invitations, and {folder} has no run.key: ask its owner. "
                "An invitation that was not used yet can be given the addresses known here, with --renew"
            )
        valid = run_owner.DAYS if days is None else days
        made = run_owner.new_invitations(folder, valid, time.time(), 1 if seats is None else seats)
        what = f"valid until {made[0].until}"
    each = "an invitation for one worker" if len(made) == 1 else f"{len(made)} invitations, each for one worker"
    _say(f"{each}, to the run {made[0].run_id}, {what}")
    if not is_training(run):
        _say("no worker of this run is running here: the addresses are those last known")
    own_loop = not (folder / RUN_JSON).exists()  # `diloco join` has nothing to run then
    how = 'diloco.join_swarm(FOLDER, "@FILE") in your loop' if own_loop else f"{command('join', '-')}, and paste it"
    _say(f"on another machine:  {how}")
    for invitation in made:
        print(invitation.text())


def revoke(run: Path, peer: Annotated[str, HYPHEN], /) -> None:
    """Exclude a peer from a run for ever, and its invitation with it.

    Works only on the machine where the run began.
    Example:  diloco revoke runs/mine 3

    Parameters
    ----------
    run
        A run folder of a swarm.
    peer
        A worker's number, its peer id, a beginning or end of the id; or an invitation (`-` and `@FILE`, too).
    """
    check_swarm()
    from diloco.swarm.trust import run_owner
    from diloco.swarm.trust.invitation import is_word, read_invitations

    which = peer if is_word(peer) else read_invitations([peer], None)[0].text()
    done = run_owner.revoke(run_owner.swarm_folder(run), which, time.time())
    record = done.record
    if done.peer is not None:
        _say(f"{done.peer} is revoked" if done.is_new else f"{done.peer} was revoked already")
    if record.invitation is None:
        _say("its invitation is not known here: until that expires, the peer can come back under a new id")
    else:
        no_peer = "the invitation {} is revoked" if done.is_new else "the invitation {} was revoked already"
        _say(("so is its invitation {}" if done.peer is not None else no_peer).format(record.invitation))
        _say(f"for a new worker:  {command('invite', shlex.quote(str(run)))}")
    if is_training(run):
        _say("the worker that runs here passes it on to the others")
    else:
        _say(f"no worker runs here: start one to tell the others ({resume_command(run)})")


def _say(line: str) -> None:
    """Print to standard error: only the result goes to standard output."""
    Console(stderr=True).print(Text(line), soft_wrap=True)
