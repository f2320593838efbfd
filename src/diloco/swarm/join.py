"""`diloco.join_swarm`: a swarm for a training loop of your own.

    engine = diloco.join_swarm("runs/mine")                 the first call founds the swarm
    engine = diloco.join_swarm("runs/mine", "@word.txt")    elsewhere, with the output of `diloco invite runs/mine`
    optimizer = diloco.DiLoCo(model, optimizer, engine)     takes over the swarm's state, if there is one

Each machine brings its own code and data. The workers compare only their models and settings (DiLoCo's `identity`).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from diloco.errors import ConfigError
from diloco.run_lock import hold_as_worker
from diloco.swarm.config import SwarmConfig
from diloco.swarm.installed import check_swarm
from diloco.swarm.run_files import (
    INVITATION_FILES,
    RUN_KEY_FILE,
    SWARM_FOLDER,
    invitation_file,
    write_private,
)
from diloco.swarm.settings import Settings

if TYPE_CHECKING:
    from diloco.engines.first_rank import FirstRankEngine
    from diloco.swarm.engine import SwarmEngine


_START_SECONDS = 120.0
"""The longest that the ranks of a worker wait for each other at the start."""


@overload
def join_swarm(
    folder: str | Path,
    invitation: str | None = ...,
    *,
    name: str = ...,
    host: str | None = ...,
    port: int | None = ...,
    announce: Sequence[str] = ...,
    timeout_seconds: float = ...,
    on_event: Callable[[str, Mapping[str, Any]], None] | None = ...,
) -> "SwarmEngine": ...
@overload
def join_swarm(
    folder: str | Path,
    invitation: str | None = ...,
    *,
    ranks: int,
    name: str = ...,
    host: str | None = ...,
    port: int | None = ...,
    announce: Sequence[str] = ...,
    timeout_seconds: float = ...,
    on_event: Callable[[str, Mapping[str, Any]], None] | None = ...,
) -> "FirstRankEngine": ...
def join_swarm(
    folder: str | Path,
    invitation: str | None = None,
    *,
    ranks: int | None = None,
    name: str = "worker-0",
    host: str | None = None,
    port: int | None = None,
    announce: Sequence[str] = (),
    timeout_seconds: float = 600.0,
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> "SwarmEngine | FirstRankEngine":
    """Make this process a worker of a swarm. Call `close()` at the end, to tell the others.

    `folder` keeps the worker's identity, its invitation and the addresses of others: with the same folder it comes back
    as the same worker. Several workers of a machine share one folder, each with a `name` and an invitation of its own.
    `invitation`: `@FILE`, `-` (standard input) or the word; None: the environment variable DILOCO_INVITATION, if
    it is set. Without an invitation the first call founds a swarm, and later calls rejoin it. `on_event(type, fields)`
    is called in another thread when workers join, leave or are lost. The schedule may jump: compute the learning rate
    from `optimizer.position`.

    `ranks`: this process is one of so many, started by torchrun, that are one worker together. The first of them joins,
    and alone needs `folder`, the invitation and the network. Before DiLoCo is built, shard the model over
    `engine.ranks.mesh("cuda")` (FSDP2) or replicate it over `engine.ranks.group` (DDP).
    """

    def join() -> "SwarmEngine":
        return _join(folder, invitation, name, host, port, announce, timeout_seconds, on_event)

    return join() if ranks is None else _join_together(join, ranks)


def _join_together(join: "Callable[[], SwarmEngine]", ranks: int) -> "FirstRankEngine":
    """Join with the first process of the world, for all of them. Collective."""
    import torch.distributed as dist

    from diloco.engines.connect import join_from_environment
    from diloco.engines.first_rank import connect_first
    from diloco.engines.ranked import ranks_of_one_worker

    owns_world = not dist.is_initialized()
    if owns_world:
        join_from_environment(_START_SECONDS)
    if dist.get_world_size() != ranks:
        raise ConfigError(
            f"ranks = {ranks}, but {dist.get_world_size()} processes have been started: all of them are one worker of "
            "the swarm; start as many (torchrun --nproc-per-node), and another worker by itself"
        )
    return connect_first(join, ranks_of_one_worker(), dist.destroy_process_group if owns_world else None)


def _join(
    folder: str | Path,
    invitation: str | None,
    name: str,
    host: str | None,
    port: int | None,
    announce: Sequence[str],
    timeout_seconds: float,
    on_event: Callable[[str, Mapping[str, Any]], None] | None,
) -> "SwarmEngine":
    check_swarm()  # before the modules that need the packages of the swarm extra
    from diloco.swarm.engine import SwarmEngine
    from diloco.swarm.network.listening import choose_port

    swarm = Path(folder).absolute() / SWARM_FOLDER
    joins = _save_invitation(swarm, name, invitation)
    (swarm.parent / "logs").mkdir(exist_ok=True)
    if port is None and not announce:
        port = choose_port(swarm, name, host)
    settings = Settings(
        folder=str(swarm),
        name=name,
        founder=not joins,
        host=host,
        port=port,
        announce=tuple(announce),
        timeout_seconds=timeout_seconds,
    )
    release = hold_as_worker(swarm.parent)
    try:
        return SwarmEngine(settings, on_event=on_event, on_close=release)
    except BaseException:
        release()
        raise


def _save_invitation(swarm: Path, name: str, source: str | None) -> bool:
    """Whether this worker was given an invitation, which is saved. If not, and it has none from an earlier start, it
    gets one made with the run's key; in an empty folder a run key is made."""
    from diloco.swarm.trust.invitation import VARIABLE, Invitation, read_invitations
    from diloco.swarm.trust.run_key import RunKey
    from diloco.swarm.trust.run_owner import check_seats, give_seats

    path = swarm / invitation_file(name)
    if source is None and not os.environ.get(VARIABLE):
        if not any(swarm.glob(INVITATION_FILES)):
            RunKey.create().save(swarm / RUN_KEY_FILE)
        check_seats(swarm, [name])
        give_seats(swarm, [name], SwarmConfig().invitation_days, time.time())
        return False
    given = read_invitations([] if source is None else [source], time.time())
    if len(given) > 1:
        raise ConfigError(f"{len(given)} invitations are given: a worker needs one")
    if path.exists():
        saved = Invitation.parse(path.read_text(), None)
        if saved.run_id != given[0].run_id:
            raise ConfigError(
                f"{swarm.parent} belongs to run {saved.run_id}, the invitation to {given[0].run_id}: use another folder"
            )
    write_private(path, given[0].text() + "\n")
    return True
