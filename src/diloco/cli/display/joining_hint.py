"""Prints how others can join a swarm's run, and what a worker waits for until it is in the swarm."""

import math
import shlex
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diloco.engines.swarm.run_files import SWARM_FOLDER
from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.training.records.events import EventReader

_PATIENT_SECONDS = 20.0
_SEARCHING = (
    "not in the swarm yet: finding its members and getting a number from the leader takes two minutes at most "
    "(logs/worker-0-swarm.log in the run folder says more)"
)


def joining_hint(console: Console, folder: Path) -> Callable[[], None]:
    """A function to call several times a second. Once a worker of this machine is in the swarm it prints, one time, how
    others can join; after _PATIENT_SECONDS without one, what the worker waits for."""
    reader, printed = EventReader(folder), False
    reader.skip()
    patient_until = time.monotonic() + _PATIENT_SECONDS

    def poll() -> None:
        nonlocal printed, patient_until
        if printed:
            return
        if time.monotonic() > patient_until:
            patient_until = math.inf
            console.print(Text(_SEARCHING), soft_wrap=True)
        for event in reader.new_events():
            if event["type"] == "swarm" and not printed:
                printed = True
                _print_hint(console, folder, bool(event["founded"]), bool(event["going_on"]))

    return poll


def _print_hint(console: Console, folder: Path, founded: bool, going_on: bool) -> None:
    """The worker that starts the swarm prints the invitation; the others say how to print theirs."""
    if not founded:
        console.print(Text("joined the swarm: continuing from its state"), soft_wrap=True)
        console.print(Text(f"to invite others: {command('invite', shlex.quote(str(folder)))}"), soft_wrap=True)
        return
    from diloco.engines.swarm.trust.run_owner import own_invitation

    alone = "no other member of the swarm answers: continuing from this machine's newest checkpoint; others can join"
    console.print(Text(alone if going_on else "the swarm starts here"), soft_wrap=True)
    try:
        invitation = own_invitation(folder / SWARM_FOLDER, time.time())
    except ConfigError as error:
        console.print(Text(f"there is no invitation to give away now: {error}", style="yellow"), soft_wrap=True)
        return
    until = f"{datetime.fromtimestamp(invitation.expires, UTC):%Y-%m-%d}"
    seats = f"{invitation.seats} workers in all, until {until}"
    console.print(Text(f"to join from other machines or terminals ({seats}):"), soft_wrap=True)
    join = command("join", invitation.text())
    console.print(Text(f"  {join}", style="bold green"), soft_wrap=True, highlight=False)
