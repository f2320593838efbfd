"""The two ways in which a machine's workers start in a swarm (start.py): found a run that others can join, or join one
with nothing but an invitation. Torch-free.

To a joiner the swarm sends data only: a description of the run (records/run_description.py says what it may hold), a
tokenizer and token shards, each checked against its digest. What concerns this machine (paths, devices, ports, which
model is loaded and executed) is decided by this machine's command line alone.
"""

import os
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
from diloco.data.order import WorkerBatches, check_validation
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.partitions import ReportProgress
from diloco.data.preparation.received_corpus import (
    bytes_to_receive,
    find_corpus,
    receive_files,
    receive_metadata,
    received_corpus_folder,
)
from diloco.errors import ConfigError, DataError, RunComplete
from diloco.models.native.presets import PRESETS
from diloco.own_command import command
from diloco.swarm.installed import check_swarm
from diloco.swarm.run_files import (
    INVITATION_FILES,
    PEERS_FILE,
    RUN_KEY_FILE,
    SWARM_FOLDER,
    invitation_file,
    write_private,
)
from diloco.training.batches import WorkerTexts
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import check_same_run, check_steps
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.launcher import LocalWorkers, StartAgain
from diloco.training.processes.local_process import SwarmSlot, worker_name
from diloco.training.processes.start import (
    EndedRun,
    Observer,
    WayToStart,
    check_device,
    check_room,
    check_vocabulary,
    create_run_folder,
    run_to_end,
    start_run,
)
from diloco.training.records.run_description import MAX_BYTES, RUN_JSON, RunDescription
from diloco.training.sizes.room import free_disk, size_text
from diloco.training.swarm.shard_claims import shards_of

if TYPE_CHECKING:
    from diloco.swarm.node.guest import Guest
    from diloco.swarm.protocol.status import RunStatus
    from diloco.swarm.trust.invitation import Invitation

SWARM_TEXT = "swarm"
"""data.source of a worker that reads its share of the swarm's text."""
CLOCK_SECONDS = 30.0
"""A clock that is off by more is refused: expiry dates and logs would be wrong."""
_MOST_DESCRIPTION_BYTES = 1 << 28


class SwarmWorkers(WayToStart):
    """Workers of a swarm on this machine, from the run folder on."""

    texts: WorkerTexts
    founder: bool
    """Whether the first of them starts the swarm if no member answers."""

    def check(self) -> None:
        check_swarm()
        self.config.ranks_of_workers()  # refuses a list of another length
        check_device(self.config)
        check_network(self.config)

    def run(self, folder: Path, observer: Observer) -> EndedRun:
        from diloco.swarm.trust.run_owner import check_seats, give_seats, may_invite

        config = self.config
        swarm = folder / SWARM_FOLDER
        names = [worker_name(index) for index in range(config.workers)]
        check_seats(swarm, names)
        if may_invite(swarm):
            give_seats(swarm, names, config.swarm.invitation_days, time.time())
        return self.run_workers(folder, observer)

    def run_workers(self, folder: Path, observer: Observer) -> EndedRun:
        """Run this machine's workers, each of which is started again if it dies."""
        config = self.config
        own = None if self.texts.own is None else self.texts.own.folder
        shared = self.texts.shared.folder
        ranks_of_workers = config.ranks_of_workers()
        slots = [
            [
                SwarmSlot(index, ranks_of_workers, folder, shared, own, os.getpid(), self.founder and index == 0, rank)
                for rank in range(ranks_of_workers[index])
            ]
            for index in range(config.workers)
        ]
        workers = LocalWorkers(config, slots, StartAgain(observer.note))
        return run_to_end(config, folder, workers, observer, resumed=self.resume is not None)


class SwarmFounder(SwarmWorkers):
    """The machine that starts a run that others can join; or any machine that continues its part of one."""

    founder = True

    def check(self) -> None:
        super().check()
        check_run_model(self.config)

    def prepare_text(self, observer: Observer) -> None:
        """Prepare the text on the machine that started the run; on one that joined it, take what it received then."""
        self.texts = self._prepared(observer)
        check_text(self.config, self.texts)
        check_room(self.config, self.texts.shared.vocab_size, self.resume)

    def _prepared(self, observer: Observer) -> WorkerTexts:
        data = self.config.data
        if self.resume is None or (self.resume / SWARM_FOLDER / RUN_KEY_FILE).exists():
            return WorkerTexts(prepare(data, observer.show_preparation))
        description = RunDescription.read(self.resume / SWARM_FOLDER / RUN_JSON)
        shared = find_corpus(data, description.corpus)
        if shared is None:
            raise ConfigError(
                f"the text of this run (digest {description.corpus[:16]}) is no longer in the cache of this machine: "
                f"join again, with {command('join', '-')}"
            )
        return WorkerTexts(shared, None if data.source == SWARM_TEXT else prepare(data, observer.show_preparation))

    def create_folder(self) -> Path:
        """Make the run folder, with the run's key and the description that joiners receive."""
        from diloco.swarm.trust.run_key import RunKey

        folder = create_run_folder(self.config)
        swarm = folder / SWARM_FOLDER
        RunKey.create().save(swarm / RUN_KEY_FILE)
        _write_description(swarm, RunDescription.of(self.config, self.texts.shared.digest))
        return folder

    def check_resumable(self, folder: Path) -> None:
        """Refuse what the workers would refuse, and renew the description for joiners: `steps` may have changed."""
        swarm = folder / SWARM_FOLDER
        digest = self.texts.shared.digest
        if not (swarm / RUN_KEY_FILE).exists() and not any(swarm.glob(INVITATION_FILES)):
            raise ConfigError(f"{folder} has no {SWARM_FOLDER}/{INVITATION_FILES}: it is not a run of a swarm")
        for checkpoint in find_checkpoints(folder)[0][-1:]:
            model = str(checkpoint.manifests[0].config["model"])  # no option can change it
            check_same_run(checkpoint, self.config.lasting(digest, model))
            check_steps(checkpoint, self.config.steps)
        description = RunDescription.of(self.config, digest)
        saved = RunDescription.read(swarm / RUN_JSON)
        if replace(saved, signature="") != description or not saved.signature:
            _write_description(swarm, description)


class SwarmJoiner(SwarmWorkers):
    """A machine that joins a run, with what a guest of the swarm may ask for."""

    founder = False

    def __init__(
        self,
        guest: "Guest",
        invitations: "Sequence[Invitation]",
        configure: Callable[[RunDescription], RunConfig],
        end_visit: Callable[[], None],
    ) -> None:
        """`end_visit` closes the guest, before the workers come with the same invitations."""
        check_clock(guest.clock())
        self.description = _fetch_description(guest)
        self.members = check_unfinished(self.description, guest.status())
        super().__init__(configure(self.description), None)
        self._guest = guest
        self._invitations = invitations
        self._end_visit = end_visit

    def prepare_text(self, observer: Observer) -> None:
        self.config, self.texts = receive_text(
            self.config,
            self.description,
            self._guest.fetch,
            self.members,
            observer.show_preparation,
            self._guest.hosts,
        )
        check_text(self.config, self.texts)

    def create_folder(self) -> Path:
        """Make the run folder, with an invitation for each worker and the addresses of the members."""
        folder = create_run_folder(self.config)
        swarm = folder / SWARM_FOLDER
        for index, invitation in enumerate(self._invitations):
            write_private(swarm / invitation_file(worker_name(index)), invitation.text() + "\n")
        write_private(swarm / RUN_JSON, self.description.text())
        self._guest.remember(swarm / PEERS_FILE)
        self._end_visit()
        return folder

    def check_resumable(self, folder: Path) -> None:
        del folder
        raise AssertionError("a run that was joined is resumed by its founder's way: diloco train --resume")


def join_run(
    invitations: "Sequence[Invitation]",
    configure: Callable[[RunDescription], RunConfig],
    observe: Callable[[RunConfig, int], AbstractContextManager[Observer]],
) -> EndedRun:
    """Ask the swarm for the run's description and text, and train. `invitations`: one for each worker of this machine.

    `observe` also receives the number of members.
    """
    from diloco.swarm.node.guest import Guest

    with ExitStack() as visit:
        guest = visit.enter_context(Guest(invitations[0], joins=True))
        way = SwarmJoiner(guest, invitations, configure, visit.close)
        ended = start_run(way, lambda config: observe(config, way.members))
        assert ended is not None, "this process tells the end of its workers"
        return ended


def describe_run(
    invitation: "Invitation", configure: Callable[[RunDescription], RunConfig]
) -> tuple[RunConfig, int, int]:
    """Ask the swarm for the run's description alone; return the configuration here, the vocabulary and the number of
    members."""
    from diloco.swarm.node.guest import Guest

    with Guest(invitation) as guest:
        check_clock(guest.clock())
        description = _fetch_description(guest)
        config = configure(description)
        members = sum(member.live and member.number >= 0 for member in guest.status().members)
        shared = find_corpus(config.data, description.corpus)
        folder = received_corpus_folder(config.data, description.corpus)
        meta = _fetch_meta(folder, description.corpus, guest.fetch, guest.hosts) if shared is None else shared.meta
        return config, meta.vocab_size, members


def _write_description(swarm: Path, description: RunDescription) -> None:
    """Write the description, signed on the machine that has the run's key; elsewhere with the signature that it came
    with."""
    from diloco.swarm.trust.run_key import RunKey
    from diloco.swarm.trust.signatures import sign

    path = swarm / RUN_JSON
    signature = ""
    if (swarm / RUN_KEY_FILE).exists():
        signature = sign(RunKey.load(swarm / RUN_KEY_FILE).seed, "run", description.lasting_bytes()).hex()
    elif path.exists():
        signature = RunDescription.read(path).signature
    write_private(path, replace(description, signature=signature).text())


# What the members send


def _fetch_description(guest: "Guest") -> RunDescription:
    """Fetch the description from every member that answered, and return the agreed one."""
    descriptions = []
    problem = ConfigError("no member of the swarm has told what it trains: try again")
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
    """Return what most members say, of those whose description the run's key has signed. (`steps` may change,
    unsigned.)"""
    from diloco.swarm.trust.signatures import is_signed

    texts = [
        description.text()
        for description in descriptions
        if is_signed(run_public, bytes.fromhex(description.signature), "run", description.lasting_bytes())
    ]
    if not texts:
        raise ConfigError(
            f"{len(descriptions)} members of the swarm describe its run, and the run's key has signed none of it: they "
            "are not to be trusted; ask the run's owner for a fresh invitation"
        )
    most = Counter(texts).most_common(1)[0][0]
    return next(description for description in descriptions if description.text() == most)


def check_unfinished(description: RunDescription, status: "RunStatus") -> int:
    """Return the number of members; raises RunComplete if they are at the end of the run."""
    present = [member for member in status.members if member.live and member.number >= 0]
    steps = int(description.values["steps"])
    if max((member.position for member in present), default=0) >= steps:
        raise RunComplete(f"the run is complete after {steps:,} steps: there is nothing left to join")
    return len(present)


class FetchFile(Protocol):
    """Fetches a file of the run from a member, the one numbered `first` if it answers (Guest.fetch)."""

    def __call__(
        self, name: str, path: Path, most_bytes: int = ..., digest: str | None = ..., *, first: int = ...
    ) -> None: ...


def receive_text(
    config: RunConfig,
    description: RunDescription,
    fetch: FetchFile,
    members: int,
    progress: ReportProgress,
    hosts: int = 1,
) -> tuple[RunConfig, WorkerTexts]:
    """Fetch what this machine needs of the text and does not have, from any of the `hosts` that `fetch` knows."""
    digest = description.corpus
    folder = received_corpus_folder(config.data, description.corpus)
    own_text = config.data.source != SWARM_TEXT
    try:
        shared = find_corpus(config.data, digest)
        if shared is None:
            meta = _fetch_meta(folder, digest, fetch, hosts)
        else:
            meta = shared.meta
            folder = shared.folder
        check_room(config, meta.vocab_size)
        shards = [] if own_text else _future_shards(len(meta.shard_tokens), members, config.workers)
        check_space(folder, bytes_to_receive(folder, meta, shards), "the text")
        shared = receive_files(folder, meta, shards, fetch, progress)
    except OSError as error:
        raise DataError(f"the text cannot be received into {folder}: {error}; no incomplete file is left") from error
    if own_text or config.model.name not in PRESETS:
        config = replace(config, data=replace(config.data, tokenizer=str(folder / TOKENIZER)))
    check_run_model(config)
    return config, WorkerTexts(shared, prepare(config.data, progress) if own_text else None)


def _fetch_meta(folder: Path, digest: str, fetch: FetchFile, hosts: int) -> CorpusMeta:
    """Return the corpus's meta.json, from the first host whose copy matches the digest."""
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
    """Return the shards of the last `workers` of `members + workers` members; later changes are fetched beside
    training."""
    places = members + workers
    shares = [shards_of(shards, place, places) for place in range(members, places)]
    return sorted({shard for share in shares for shard in share})


# What is checked on this machine


def check_network(config: RunConfig) -> None:
    """Refuse a port that is taken, and addresses that cannot be, before anything is prepared."""
    from diloco.swarm.network.listening import check_name, check_ports, listen_addresses, parse_announced

    ports = [None] if config.port is None else [config.port + index for index in range(config.workers)]
    for port in ports:
        check_ports(listen_addresses(config.host, port))
    for text in [] if config.announce is None else config.announce.split(","):
        check_name(parse_announced(text.strip(), config.port))


def check_text(config: RunConfig, texts: WorkerTexts) -> None:
    """Refuse text that is too little for these workers, or does not fit the model, before a worker is started."""
    length = config.data.sequence_length
    batch = config.training.batch_size
    read = texts.read
    for index in range(config.workers):
        shards = [shard for shard in shards_of(read.shards, index, config.workers) if read.has(shard)]
        if shards:
            WorkerBatches(read, length, batch, shards, config.seed)
    check_validation(texts.shared, length, config.training.eval_windows)
    check_vocabulary(config, texts.shared)


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
