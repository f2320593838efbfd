"""A swarm's workers on this machine: start a run that others can join, or resume one. Torch-free.

run_swarm_workers is also the second half of joining (join.py).
"""

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.data.corpus import Corpus
from diloco.data.order import WorkerBatches, check_validation
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.received_corpus import find_corpus
from diloco.engines.swarm.installed import check_swarm
from diloco.engines.swarm.run_files import INVITATION_FILES, RUN_KEY_FILE, SWARM_FOLDER, write_private
from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.run_lock import run_lock
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import check_same_run, check_steps
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.launcher import LocalWorkers, StartAgain
from diloco.training.processes.local_process import SwarmSlot, worker_name
from diloco.training.processes.run import EndedRun, Observe, Observer, run_to_end
from diloco.training.processes.run_setup import (
    check_device,
    check_out,
    check_room,
    check_vocabulary,
    create_run_folder,
    reopen_run_folder,
)
from diloco.training.records.run_description import RUN_JSON, RunDescription
from diloco.training.swarm.shard_claims import shards_of

SWARM_TEXT = "swarm"
"""data.source of a worker that reads its share of the swarm's text."""


@dataclass(frozen=True)
class SwarmText:
    """The prepared text of this machine's workers."""

    shared: Corpus
    own: Corpus | None = None
    """Read instead of the shared text, if this machine has its own."""


def train_in_swarm(config: RunConfig, resume: Path | None, observe: Observe) -> EndedRun:
    """Start a run that others can join, or continue the one in the folder `resume`."""
    check_swarm()
    check_device(config)
    check_network(config)
    with ExitStack() as until_summarized:
        if resume is None:
            check_out(config)
        else:
            until_summarized.enter_context(run_lock(resume))
        check_run_model(config)
        observer = until_summarized.enter_context(observe(config))
        text = _prepare_text(config, resume, observer)
        check_text(config, text)
        check_room(config, text.shared.vocab_size, resume)
        if resume is None:
            folder = create_run_folder(config)
            until_summarized.enter_context(run_lock(folder))
            _write_swarm_files(folder, config, text.shared.digest)
        else:
            folder = resume
            _check_resumable(folder, config, text.shared.digest)
            reopen_run_folder(folder, config)
        return run_swarm_workers(config, folder, text, observer, founder=True, resumed=resume is not None)


def run_swarm_workers(
    config: RunConfig, folder: Path, text: SwarmText, observer: Observer, *, founder: bool, resumed: bool = False
) -> EndedRun:
    """Run the local workers to their end. `founder`: the first of them starts the swarm if no member answers."""
    from diloco.engines.swarm.trust.run_owner import check_seats, give_seats, may_invite

    swarm, names = folder / SWARM_FOLDER, [worker_name(index) for index in range(config.workers)]
    check_seats(swarm, names)
    if may_invite(swarm):
        give_seats(swarm, names, config.swarm.invitation_days, time.time())
    own = None if text.own is None else text.own.folder
    slots = [
        SwarmSlot(index, config.workers, folder, text.shared.folder, own, os.getpid(), founder and index == 0)
        for index in range(config.workers)
    ]
    workers = LocalWorkers(config, slots, StartAgain(observer.note))
    return run_to_end(config, folder, workers, observer, resumed=resumed)


def check_network(config: RunConfig) -> None:
    """Refuse a port that is taken, and addresses that cannot be, before anything is prepared."""
    from diloco.engines.swarm.network.addresses import check_name, listen_addresses, parse_announced
    from diloco.engines.swarm.network.listen_port import check_ports

    ports = [None] if config.port is None else [config.port + index for index in range(config.workers)]
    for port in ports:
        check_ports(listen_addresses(config.host, port))
    for text in [] if config.announce is None else config.announce.split(","):
        check_name(parse_announced(text.strip(), config.port))


def check_text(config: RunConfig, text: SwarmText) -> None:
    """Refuse text that is too little for these workers, or does not fit the model, before a worker is started."""
    length, batch = config.data.sequence_length, config.training.batch_size
    read = text.own or text.shared
    for index in range(config.workers):
        shards = [shard for shard in shards_of(read.shards, index, config.workers) if read.has(shard)]
        if shards:
            WorkerBatches(read, length, batch, shards, config.seed)
    check_validation(text.shared, length, config.training.eval_windows)
    check_vocabulary(config, text.shared)


def _prepare_text(config: RunConfig, resume: Path | None, observer: Observer) -> SwarmText:
    """Prepared on the machine that started the run; received from the swarm on a machine that joined it."""
    if resume is None or (resume / SWARM_FOLDER / RUN_KEY_FILE).exists():
        return SwarmText(prepare(config.data, observer.show_preparation))
    description = RunDescription.read(resume / SWARM_FOLDER / RUN_JSON)
    shared = find_corpus(config.data, description.corpus)
    if shared is None:
        raise ConfigError(
            f"the text of this run (digest {description.corpus[:16]}) is no longer in the cache of this machine: join "
            f"again, with {command('join', '-')}"
        )
    return SwarmText(
        shared, None if config.data.source == SWARM_TEXT else prepare(config.data, observer.show_preparation)
    )


def _write_swarm_files(folder: Path, config: RunConfig, corpus_digest: str) -> None:
    """The run's key, and the description that joiners receive."""
    from diloco.engines.swarm.trust.run_key import RunKey

    swarm = folder / SWARM_FOLDER
    key = RunKey.create()
    key.save(swarm / RUN_KEY_FILE)
    _write_description(swarm, RunDescription.of(config, corpus_digest))


def _write_description(swarm: Path, description: RunDescription) -> None:
    """Signed, on the machine that has the run's key; elsewhere with the signature that it came with."""
    from diloco.engines.swarm.trust.run_key import RunKey
    from diloco.engines.swarm.trust.signatures import sign

    path, signature = swarm / RUN_JSON, ""
    if (swarm / RUN_KEY_FILE).exists():
        signature = sign(RunKey.load(swarm / RUN_KEY_FILE).seed, "run", description.lasting_bytes()).hex()
    elif path.exists():
        signature = RunDescription.read(path).signature
    write_private(path, replace(description, signature=signature).text())


def _check_resumable(folder: Path, config: RunConfig, corpus_digest: str) -> None:
    """Before anything in the run folder is changed. Renews the description for joiners: `steps` may have changed."""
    swarm = folder / SWARM_FOLDER
    if not (swarm / RUN_KEY_FILE).exists() and not any(swarm.glob(INVITATION_FILES)):
        raise ConfigError(f"{folder} has no {SWARM_FOLDER}/{INVITATION_FILES}: it is not a run of a swarm")
    for checkpoint in find_checkpoints(folder)[0][-1:]:
        model = str(checkpoint.manifests[0].config["model"])  # no option can change it
        check_same_run(checkpoint, config.lasting(corpus_digest, model))
        check_steps(checkpoint, config.steps)
    description = RunDescription.of(config, corpus_digest)
    saved = RunDescription.read(folder / SWARM_FOLDER / RUN_JSON)
    if replace(saved, signature="") != description or not saved.signature:
        _write_description(folder / SWARM_FOLDER, description)
