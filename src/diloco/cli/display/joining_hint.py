"""Prints how others can join a swarm's run, and what a worker waits for until it is in the swarm."""

import math
import shlex
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diloco.history.run_history import LiveHistory
from diloco.own_command import command
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.training.config.run import RunConfig

_PATIENT_SECONDS = 20.0
_SEARCHING = (
    "not in the swarm yet: finding its members and getting a number from the leader takes two minutes at most "
    "(logs/worker-0-swarm.log in the run folder says more)"
)


def joining_hint(console: Console, config: RunConfig, live: LiveHistory) -> Callable[[], None]:
    """A function to call several times a second. Once a worker of this machine is in the swarm it prints, one time, how
    others can join; after _PATIENT_SECONDS without one, what the worker waits for. What `live` has by now is of earlier
    starts."""
    begins = live.history.clock.last or 0.0
    printed = False
    patient_until = time.monotonic() + _PATIENT_SECONDS

    def poll() -> None:
        nonlocal printed, patient_until
        if printed:
            return
        if time.monotonic() > patient_until:
            patient_until = math.inf
            console.print(Text(_SEARCHING), soft_wrap=True)
        entered = live.history.swarm
        if entered is not None and entered.time > begins:
            printed = True
            _print_hint(console, config, live.folder, entered.founded, entered.going_on)

    return poll


def _print_hint(console: Console, config: RunConfig, folder: Path, founded: bool, going_on: bool) -> None:
    """The worker that starts the swarm prints the first invitations; the others say how it goes on."""
    invite = command("invite", shlex.quote(str(folder)))
    if not founded:
        console.print(Text("joined the swarm: continuing from its state"), soft_wrap=True)
    elif going_on:
        alone = "no other member of the swarm answers: continuing from this machine's newest checkpoint"
        console.print(Text(alone), soft_wrap=True)
    else:
        console.print(Text("the swarm starts here"), soft_wrap=True)
    from diloco.swarm.trust.run_owner import may_invite, new_invitations

    swarm = folder / SWARM_FOLDER
    if not may_invite(swarm):
        console.print(Text("to invite others: on the machine where the run began"), soft_wrap=True)
        return
    seats = config.swarm.seats
    if founded and not going_on and seats:
        made = new_invitations(swarm, config.swarm.invitation_days, time.time(), seats)
        until = f"{datetime.fromtimestamp(made[0].expires, UTC):%Y-%m-%d}"
        each = "one more worker" if seats == 1 else f"{seats} more workers, one line each"
        console.print(
            Text(f"for {each}, until {until}: run `{command('join', '-')}` on its machine, or in another terminal, and "
                 "paste"),
            soft_wrap=True,
        )  # fmt: skip
        for invitation in made:
            console.print(Text(f"  {invitation.text()}", style="bold green"), soft_wrap=True, highlight=False)
        console.print(Text(f"for others (each invitation is for one worker): {invite}"), soft_wrap=True)
    else:
        console.print(Text(f"to invite others: {invite}"), soft_wrap=True)
