"""A swarm for anybody's training loop: `diloco.join_swarm`.

    engine = diloco.join_swarm("runs/mine")                 the first time: begins a swarm
    engine = diloco.join_swarm("runs/mine", "diloco1...")   elsewhere, with what `diloco invite runs/mine` has printed
    optimizer = diloco.DiLoCo(model, optimizer, engine)     with the others' state, if somebody is there

Code and data are each machine's own here: workers compare models and settings (DiLoCo's `identity`), nothing else.
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
    """This process's worker in a swarm; call `close()` at the end, and the others are told.

    `folder` keeps the worker's name, its invitation and the others' addresses: with the same folder it comes back as
    the same worker. Several workers of a machine share one folder, each with a `name` of its own. Without an
    invitation the first call begins a swarm, and later ones go back to it. `on_event` hears of joins, leaves and
    losses, in another thread. The schedule may jump: let a learning rate follow `optimizer.loop.inner_steps`.
    """
    check_swarm()
    from diloco.engines.swarm.engine import SwarmEngine  # needs the packages of the swarm extra

    swarm = Path(folder).absolute() / SWARM_FOLDER
    if invitation is not None:
        _keep(swarm, Invitation.parse(invitation, time.time()))
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


def _keep(swarm: Path, given: Invitation) -> None:
    """An invitation to another run than the folder's is a mistake."""
    path = swarm / INVITATION_FILE
    if path.exists():
        here = Invitation.parse(path.read_text(), None)
        if here.run_id != given.run_id:
            raise ConfigError(
                f"{swarm.parent} belongs to the run {here.run_id}, the invitation to {given.run_id}: use another folder"
            )
    write_private(path, given.text() + "\n")
