"""A swarm's workers on this machine: how `diloco train --engine swarm` begins a run or goes on with one, and what is
the same for `diloco join` once it has what it needs."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diloco.cli.display.live import Display
from diloco.cli.train import (
    begin_again,
    both,
    check_out,
    is_complete,
    new_run_folder,
    noting,
    outcome,
    stop_on_signals,
    summarized,
    tell_end,
)
from diloco.data.corpus import Corpus
from diloco.data.order import WorkerBatches, validation_batches
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.received_corpus import find_corpus
from diloco.engines.swarm.installed import check_swarm
from diloco.engines.swarm.run_files import INVITATION_FILE, RUN_KEY_FILE, SWARM_FOLDER, write_private
from diloco.errors import ConfigError
from diloco.models.pretrained import check_model
from diloco.sinks.process import SinkProcesses
from diloco.sinks.registry import check_installed
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import check_same_run, check_steps
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.local_process import SwarmSlot
from diloco.training.processes.run_lock import run_lock
from diloco.training.processes.swarm_launcher import SwarmWorkers
from diloco.training.records.events import EventReader
from diloco.training.records.run_description import RUN_JSON, Described
from diloco.training.shard_claims import shards_of

SWARM_TEXT = "swarm"
"""data.source of a worker that reads what the swarm shares out."""
_DAY_SECONDS = 86_400.0
_PATIENT_SECONDS = 20.0
_LOOKING = (
    "not in the swarm yet: looking for the others and asking the one who leads them for a number takes two minutes at "
    "most (logs/worker-0-swarm.log in the run folder tells more)"
)


@dataclass(frozen=True)
class Prepared:
    """What the workers of this machine read."""

    shared: Corpus
    own: Corpus | None = None


def check_network(config: RunConfig) -> None:
    """Refuse a port that is taken, and addresses that cannot be, before anything is prepared."""
    from diloco.engines.swarm.network.addresses import check_name, listen_addresses, parse_announced
    from diloco.engines.swarm.network.listen_port import check_ports

    ports = [None] if config.port is None else [config.port + index for index in range(config.workers)]
    for port in ports:
        check_ports(listen_addresses(config.host, port))
    for text in [] if config.announce is None else config.announce.split(","):
        check_name(parse_announced(text.strip(), config.port))


def train_in_swarm(config: RunConfig, console: Console, resume: Path | None) -> None:
    """Begin a run that others can join, or go on with one."""
    check_swarm()
    check_network(config)
    check_installed(config.sink_names)
    with ExitStack() as held:
        if resume is not None:
            held.enter_context(run_lock(resume))
            if is_complete(console, resume, config):
                return
        else:
            check_out(config)
        check_run_model(config)
        with Display(console, config) as display:
            text = _text(config, resume, display)
            check_text(config, text)
            folder = resume or new_run_folder(config)
            if resume is None:
                held.enter_context(run_lock(folder))
                found(folder, config, text.shared.digest)
            else:
                check_resumable(folder, config, text.shared.digest)
                begin_again(folder, config)
            run_workers(config, console, display, folder, text, held, founder=True, resumed=resume is not None)


def run_workers(
    config: RunConfig,
    console: Console,
    display: Display,
    folder: Path,
    text: Prepared,
    held: ExitStack,
    *,
    founder: bool,
    resumed: bool = False,
) -> None:
    """The local workers from their start to the report. `founder`: the first of them may begin the swarm (anew)."""
    own = None if text.own is None else text.own.folder
    slots = [
        SwarmSlot(index, config.workers, folder, text.shared.folder, own, os.getpid(), founder and index == 0)
        for index in range(config.workers)
    ]
    sinks = held.enter_context(SinkProcesses(config.sink_names, folder, noting(console)))
    workers = SwarmWorkers(config, slots, noting(console))
    poll = both(both(display.follow(folder, resumed=resumed), inviting(console, folder)), sinks.poll)
    with stop_on_signals(display.with_stop_message(workers.stop)):
        error = outcome(lambda: workers.run(poll))
    display.close()
    tell_end(console, folder, summarized(folder, config, error), error)


def _text(config: RunConfig, resume: Path | None, display: Display) -> Prepared:
    """The text as it is on this machine: prepared where the run began, received where it was joined."""
    if resume is None or (resume / SWARM_FOLDER / RUN_KEY_FILE).exists():
        return Prepared(prepare(config.data, display.show_preparation))
    described = Described.read(resume / SWARM_FOLDER / RUN_JSON)
    shared = find_corpus(config.data, described.corpus)
    if shared is None:
        raise ConfigError(
            f"the text of this run (digest {described.corpus[:16]}) is no longer in the cache of this machine: come in "
            "anew, with diloco join INVITATION"
        )
    return Prepared(
        shared, None if config.data.source == SWARM_TEXT else prepare(config.data, display.show_preparation)
    )


def check_text(config: RunConfig, text: Prepared) -> None:
    """Refuse text that is too little for these workers, or foreign to the model, before any of them is started."""
    length, batch = config.data.sequence_length, config.training.batch_size
    read = text.own or text.shared
    for index in range(config.workers):
        shards = [shard for shard in shards_of(read.shards, index, config.workers) if read.has(shard)]
        if shards:
            WorkerBatches(read, length, batch, shards, config.seed)
    validation_batches(text.shared, length, batch)
    pretrained = check_model(config.model, weights=False)
    if pretrained is not None:
        pretrained.check(vocab_size=text.shared.vocab_size, sequence_length=length)


def found(folder: Path, config: RunConfig, corpus_digest: str) -> None:
    """The run's key, its first invitation, and what joiners are told of it."""
    from diloco.engines.swarm.trust.invitation import invite
    from diloco.engines.swarm.trust.run_key import RunKey

    swarm = folder / SWARM_FOLDER
    key = RunKey.create()
    key.save(swarm / RUN_KEY_FILE)
    first = invite(key, (), config.swarm.invitation_days * _DAY_SECONDS, time.time())
    write_private(swarm / INVITATION_FILE, first.text() + "\n")
    write_private(swarm / RUN_JSON, Described.of(config, corpus_digest).text())


def check_resumable(folder: Path, config: RunConfig, corpus_digest: str) -> None:
    """Before anything in the run folder is changed; also renews what joiners are told (its end may be another now)."""
    if not (folder / SWARM_FOLDER / INVITATION_FILE).is_file():
        raise ConfigError(f"{folder} has no {SWARM_FOLDER}/{INVITATION_FILE}: it is not a run of a swarm")
    for checkpoint in find_checkpoints(folder)[0][-1:]:
        model = str(checkpoint.manifests[0].config["model"])  # which no option can change
        check_same_run(checkpoint, config.lasting(corpus_digest, model))
        check_steps(checkpoint, config.steps)
    described = Described.of(config, corpus_digest)
    if Described.read(folder / SWARM_FOLDER / RUN_JSON) != described:
        write_private(folder / SWARM_FOLDER / RUN_JSON, described.text())


def inviting(console: Console, folder: Path) -> Callable[[], None]:
    """Says how others can join, as soon as a worker of this machine is in the swarm; and before, what it waits for."""
    reader, said = EventReader(folder), [False]
    reader.skip()
    patient_until = [time.monotonic() + _PATIENT_SECONDS]

    def poll() -> None:
        if said[0]:
            return
        if time.monotonic() > patient_until[0]:
            patient_until[0] = math.inf
            console.print(Text(_LOOKING), soft_wrap=True)
        for event in reader.new_events():
            if event["type"] == "swarm" and not said[0]:
                said[0] = True
                _say_how(console, folder, bool(event["founded"]), bool(event["going_on"]))

    return poll


def _say_how(console: Console, folder: Path, founded: bool, going_on: bool) -> None:
    from diloco.engines.swarm.trust.run_owner import own_invitation

    if founded and going_on:
        how = "nobody else of the swarm answers: going on from this machine's newest checkpoint; others can come to it"
    else:
        how = "the swarm begins here" if founded else "others of the swarm are there: going on with their state"
    console.print(Text(how), soft_wrap=True)
    try:
        invitation = own_invitation(folder / SWARM_FOLDER, time.time())
    except ConfigError as error:
        console.print(Text(f"nobody can be invited now: {error}", style="yellow"), soft_wrap=True)
        return
    until = f"{datetime.fromtimestamp(invitation.expires, UTC):%Y-%m-%d}"
    console.print(Text(f"to join from another machine or terminal (until {until}):"), soft_wrap=True)
    console.print(Text(f"  diloco join {invitation.text()}", style="bold green"), soft_wrap=True, highlight=False)


def with_text(config: RunConfig, **data: object) -> RunConfig:
    return replace(config, data=replace(config.data, **data))  # type: ignore[arg-type]
