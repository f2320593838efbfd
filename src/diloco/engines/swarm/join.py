"""`diloco.join_swarm`: a swarm for a training loop of your own.

    engine = diloco.join_swarm("runs/mine")                 the first call founds the swarm
    engine = diloco.join_swarm("runs/mine", "diloco2...")   elsewhere, with the output of `diloco invite runs/mine`
    optimizer = diloco.DiLoCo(model, optimizer, engine)     takes over the swarm's state, if there is one

Each machine brings its own code and data. The workers compare only their models and settings (DiLoCo's `identity`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.engines.swarm.config import SwarmConfig
from diloco.engines.swarm.installed import check_swarm
from diloco.engines.swarm.run_files import INVITATION_FILE, RUN_KEY_FILE, SWARM_FOLDER, write_private
from diloco.engines.swarm.settings import Settings
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.engines.swarm.engine import SwarmEngine

_INVITATION_SECONDS = 30 * 86_400.0


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
    `optimizer.position`.
    """
    check_swarm()  # before the modules that need the packages of the swarm extra
    from diloco.engines.swarm.engine import SwarmEngine
    from diloco.engines.swarm.network.listen_port import choose_port

    swarm = Path(folder).absolute() / SWARM_FOLDER
    _save_invitation(swarm, invitation)
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


def _save_invitation(swarm: Path, text: str | None) -> None:
    """The given one; if there is none, neither given nor saved before, make a run key and an invitation with it."""
    from diloco.engines.swarm.trust.invitation import Invitation, invite
    from diloco.engines.swarm.trust.run_key import RunKey

    path = swarm / INVITATION_FILE
    if text is not None:
        given = Invitation.parse(text, time.time())
        saved = Invitation.parse(path.read_text(), None) if path.exists() else given
        if saved.run_id != given.run_id:
            raise ConfigError(
                f"{swarm.parent} belongs to run {saved.run_id}, the invitation to {given.run_id}: use another folder"
            )
        write_private(path, given.text() + "\n")
    elif not path.exists():
        key = RunKey.create()
        key.save(swarm / RUN_KEY_FILE)
        write_private(path, invite(key, (), _INVITATION_SECONDS, time.time(), SwarmConfig().seats).text() + "\n")
