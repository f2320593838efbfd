"""Join a swarm's run with nothing but an invitation: `diloco join`. Torch-free.

The swarm sends data only: a description of the run (records/run_description.py says what it may hold), a tokenizer and
token shards, each checked against its digest. What concerns this machine (paths, devices, ports, which model is loaded
and executed) is decided by this machine's command line alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from diloco.data.corpus import TOKENIZER, CorpusMeta
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.partitions import Progress
from diloco.data.preparation.received_corpus import (
    bytes_to_receive,
    find_corpus,
    receive_files,
    receive_metadata,
    received_corpus_folder,
)
from diloco.engines.swarm.run_files import PEERS_FILE, SWARM_FOLDER, invitation_file, write_private
from diloco.errors import ConfigError, DataError, RunComplete
from diloco.models.native.presets import PRESETS
from diloco.run_lock import run_lock
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.local_process import worker_name
from diloco.training.processes.run import EndedRun, Observer
from diloco.training.processes.run_setup import check_device, check_out, check_room, create_run_folder
from diloco.training.processes.swarm_run import SWARM_TEXT, SwarmText, check_network, check_text, run_swarm_workers
from diloco.training.records.run_description import MAX_BYTES, RUN_JSON, RunDescription
from diloco.training.sizes.disk import size_text
from diloco.training.sizes.machine import free_disk
from diloco.training.swarm.shard_claims import shards_of

if TYPE_CHECKING:
    from diloco.engines.swarm.node.guest import Guest
    from diloco.engines.swarm.node.status import RunStatus
    from diloco.engines.swarm.trust.invitation import Invitation

CLOCK_SECONDS = 30.0
"""A clock that is off by more is refused: expiry dates and logs would be wrong."""
_MOST_DESCRIPTION_BYTES = 1 << 28


class FetchFile(Protocol):
    """Fetches a file of the run from a member, the one numbered `first` if it answers (Guest.fetch)."""

    def __call__(
        self, name: str, path: Path, most_bytes: int = ..., digest: str | None = ..., *, first: int = ...
    ) -> None: ...


def join_run(
    invitations: "Sequence[Invitation]",
    configure: Callable[[RunDescription], RunConfig],
    observe: Callable[[RunConfig, int], AbstractContextManager[Observer]],
) -> EndedRun:
    """Ask the swarm for the run's description and text, and train. `invitations`: one for each worker of this machine.

    `observe` also receives the number of members.
    """
    from diloco.engines.swarm.node.guest import Guest

    with ExitStack() as until_summarized:
        with Guest(invitations[0], joins=True) as guest:
            check_clock(guest.clock())
            description = _fetch_description(guest)
            members = check_unfinished(description, guest.status())
            config = configure(description)
            check_device(config)
            check_out(config)
            check_network(config)
            observer = until_summarized.enter_context(observe(config, members))
            config, text = receive_text(
                config, description, guest.fetch, members, observer.show_preparation, guest.hosts
            )
            check_text(config, text)
            folder = create_run_folder(config)
            until_summarized.enter_context(run_lock(folder))
            for index, invitation in enumerate(invitations):
                write_private(folder / SWARM_FOLDER / invitation_file(worker_name(index)), invitation.text() + "\n")
            write_private(folder / SWARM_FOLDER / RUN_JSON, description.text())
            guest.remember(folder / SWARM_FOLDER / PEERS_FILE)
        return run_swarm_workers(config, folder, text, observer, founder=False)


def describe_run(
    invitation: "Invitation", configure: Callable[[RunDescription], RunConfig]
) -> tuple[RunConfig, int, int]:
    """Ask the swarm for the run's description alone: the configuration here, the vocabulary, the number of members."""
    from diloco.engines.swarm.node.guest import Guest

    with Guest(invitation) as guest:
        check_clock(guest.clock())
        description = _fetch_description(guest)
        config = configure(description)
        members = sum(one.live and one.number >= 0 for one in guest.status().members)
        shared = find_corpus(config.data, description.corpus)
        folder = received_corpus_folder(config.data, description.corpus)
        meta = _fetch_meta(folder, description.corpus, guest.fetch, guest.hosts) if shared is None else shared.meta
        return config, meta.vocab_size, members


# The run's description


def _fetch_description(guest: "Guest") -> RunDescription:
    """Fetched from every member that answered."""
    descriptions, problem = [], ConfigError("no member of the swarm has told what it trains: try again")
    with TemporaryDirectory(prefix="diloco-") as temporary:
        path = Path(temporary) / RUN_JSON
        for first in range(guest.hosts):
            guest.fetch(RUN_JSON, path, MAX_BYTES, first=first)
            try:
                descriptions.append(RunDescription.read(path))
            except ConfigError as error:
                problem = error
    if not descriptions:
        raise problem
    return agreed_description(descriptions, guest.run_public)


def agreed_description(descriptions: Sequence[RunDescription], run_public: bytes) -> RunDescription:
    """What most members say, of those whose description the run's key has signed. (`steps` may change, unsigned.)"""
    from diloco.engines.swarm.trust.signatures import is_signed

    texts = [
        one.text()
        for one in descriptions
        if is_signed(run_public, bytes.fromhex(one.signature), "run", one.lasting_bytes())
    ]
    if not texts:
        raise ConfigError(
            f"{len(descriptions)} members of the swarm describe its run, and the run's key has signed none of it: they "
            "are not to be trusted; ask the run's owner for a fresh invitation"
        )
    most = Counter(texts).most_common(1)[0][0]
    return next(one for one in descriptions if one.text() == most)


def check_unfinished(description: RunDescription, status: "RunStatus") -> int:
    """The number of members; raises RunComplete if they are at the end of the run."""
    present = [one for one in status.members if one.live and one.number >= 0]
    steps = int(description.values["steps"])
    if max((one.position for one in present), default=0) >= steps:
        raise RunComplete(f"the run is complete after {steps:,} steps: there is nothing left to join")
    return len(present)


# The run's text


def receive_text(
    config: RunConfig,
    description: RunDescription,
    fetch: FetchFile,
    members: int,
    progress: Progress,
    hosts: int = 1,
) -> tuple[RunConfig, SwarmText]:
    """Fetch what this machine needs of the text and does not have, from any of the `hosts` that `fetch` knows."""
    digest, folder = description.corpus, received_corpus_folder(config.data, description.corpus)
    own_text = config.data.source != SWARM_TEXT
    try:
        shared = find_corpus(config.data, digest)
        if shared is None:
            meta = _fetch_meta(folder, digest, fetch, hosts)
        else:
            meta, folder = shared.meta, shared.folder
        check_room(config, meta.vocab_size)
        shards = [] if own_text else _future_shards(len(meta.shard_tokens), members, config.workers)
        check_space(folder, bytes_to_receive(folder, meta, shards), "the text")
        shared = receive_files(folder, meta, shards, fetch, progress)
    except OSError as error:
        raise DataError(f"the text cannot be received into {folder}: {error}; no incomplete file is left") from error
    if own_text or config.model.name not in PRESETS:
        config = replace(config, data=replace(config.data, tokenizer=str(folder / TOKENIZER)))
    check_run_model(config)
    return config, SwarmText(shared, prepare(config.data, progress) if own_text else None)


def _fetch_meta(folder: Path, digest: str, fetch: FetchFile, hosts: int) -> CorpusMeta:
    """The corpus's meta.json, from the first host whose copy matches the digest."""
    problem: DataError | None = None
    for first in range(hosts):
        bounded = partial(fetch, most_bytes=_MOST_DESCRIPTION_BYTES, first=first)
        try:
            return receive_metadata(folder, digest, bounded)
        except DataError as error:
            problem = error
    assert problem is not None, "at least one host was asked"
    raise problem


def _future_shards(shards: int, members: int, workers: int) -> list[int]:
    """The shards of the last `workers` of `members + workers` members; later changes are fetched beside training."""
    places = members + workers
    shares = [shards_of(shards, place, places) for place in range(members, places)]
    return sorted({shard for share in shares for shard in share})


# This machine


def check_clock(theirs: float) -> None:
    off = time.time() - theirs
    if abs(off) > CLOCK_SECONDS:
        raise ConfigError(
            f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the swarm's: set it, with "
            "`timedatectl set-ntp true`, say, and try again"
        )


def check_space(folder: Path, needed: int, what: str) -> None:
    free = free_disk(folder)
    if free < needed:
        raise ConfigError(
            f"there is no room for {what} in {folder}: {size_text(needed)} needed, {size_text(free)} free; make room, "
            "or choose another place with --out or --data.cache_dir"
        )
