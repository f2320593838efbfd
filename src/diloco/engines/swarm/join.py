"""`diloco.join_swarm`: a swarm for a training loop of your own.

    engine = diloco.join_swarm("runs/mine")                 the first call founds the swarm
    engine = diloco.join_swarm("runs/mine", "diloco1...")   elsewhere, with the output of `diloco invite runs/mine`
    optimizer = diloco.DiLoCo(model, optimizer, engine)     takes over the swarm's state, if there is one

Each machine brings its own code and data. The workers compare only their models and settings (DiLoCo's `identity`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.engines.swarm.installed import check_swarm
from diloco.engines.swarm.network.listen_port import choose_port
from diloco.engines.swarm.run_files import INVITATION_FILE, RUN_KEY_FILE, SWARM_FOLDER, write_private
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.trust.invitation import Invitation, invite
from diloco.engines.swarm.trust.run_key import RunKey
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.engines.swarm.engine import SwarmEngine

_DAYS = 30.0
_DAY_SECONDS = 86_400.0


def join_swarm(
    folder: str | Path,
    invitation: str | None = None,
    *,
    name: str = "worker-0",
    host: str | None = None,
    port: int | None = None,
    announce: Sequence[str] = (),
    timeout_seconds: float = 600.0,
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> "SwarmEngine":
    """Make this process a worker of a swarm. Call `close()` at the end, to tell the others.

    `folder` keeps the worker's identity, its invitation and the addresses of others: with the same folder it comes back
    as the same worker. Several workers of a machine share one folder, each with a `name` of its own. Without an
    invitation the first call founds a swarm, and later calls rejoin it. `on_event(type, fields)` is called in another
    thread when workers join, leave or are lost. The schedule may jump: compute the learning rate from
    `optimizer.loop.inner_steps`.
    """
    check_swarm()
    from diloco.engines.swarm.engine import SwarmEngine  # needs the packages of the swarm extra

    swarm = Path(folder).absolute() / SWARM_FOLDER
    if invitation is not None:
        _save_invitation(swarm, Invitation.parse(invitation, time.time()))
    elif not (swarm / INVITATION_FILE).exists():
        key = RunKey.create()
        key.save(swarm / RUN_KEY_FILE)
        write_private(swarm / INVITATION_FILE, invite(key, (), _DAYS * _DAY_SECONDS, time.time()).text() + "\n")
    (swarm.parent / "logs").mkdir(exist_ok=True)
    if port is None and not announce:
        port = choose_port(swarm, name, host)
    settings = Settings(
        folder=str(swarm),
        name=name,
        founder=invitation is None,
        host=host,
        port=port,
        announce=tuple(announce),
        timeout_seconds=timeout_seconds,
    )
    return SwarmEngine(settings, on_event=on_event)


def _save_invitation(swarm: Path, given: Invitation) -> None:
    """Raises ConfigError if it is for another run than the folder's."""
    path = swarm / INVITATION_FILE
    if path.exists():
        here = Invitation.parse(path.read_text(), None)
        if here.run_id != given.run_id:
            raise ConfigError(
                f"{swarm.parent} belongs to the run {here.run_id}, the invitation to {given.run_id}: use another folder"
            )
    write_private(path, given.text() + "\n")
