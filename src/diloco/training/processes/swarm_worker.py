"""A worker process of a swarm: joins the swarm or starts it, builds its training, runs it, and leaves."""

import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from diloco.data.corpus import Corpus
from diloco.data.preparation.received_corpus import corpus_files
from diloco.history.events import Emit, RenumberedEvent, SwarmEvent, WarmStartEvent, make_event
from diloco.history.log import EventLog
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.network.listening import choose_port
from diloco.swarm.protocol.status import RunStatus
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.swarm.settings import Settings
from diloco.training.batches import WorkerTexts
from diloco.training.checkpoints.resume import newest_start
from diloco.training.config.run import RunConfig
from diloco.training.processes.cores import SharedCores, registry
from diloco.training.processes.local_process import SwarmSlot
from diloco.training.processes.worker import device_of, on_stop_signals, run_training
from diloco.training.records.run_description import RUN_JSON
from diloco.training.sizes.estimate import emit_sizes, sharing
from diloco.training.swarm.training import SwarmTraining

logger = logging.getLogger(__name__)

_WARM_START_POLL_SECONDS = 0.2
_WARM_START_EVENT_SECONDS = 60.0


class _Stopped(BaseException):
    """A stop request before the first inner step: there is nothing to save."""


def train_swarm_worker(config: RunConfig, slot: SwarmSlot) -> None:
    """Join the swarm or found it, train, and leave."""
    try:
        _train(config, slot)
    except _Stopped:
        logger.info("stopped before the first step")


def settings_of(config: RunConfig, slot: SwarmSlot) -> Settings:
    """Return the settings of this worker's sidecar. Each local worker has a port of its own."""
    swarm = config.swarm
    announce = () if config.announce is None else tuple(address.strip() for address in config.announce.split(","))
    folder = slot.run_folder.absolute() / SWARM_FOLDER
    port = None if config.port is None else config.port + slot.index
    if port is None and not announce:  # an announced address needs a port that the user knows
        port = choose_port(folder, slot.name, config.host)
    return Settings(
        folder=str(folder),
        name=slot.name,
        founder=slot.founder,
        host=config.host,
        port=port,
        announce=announce,
        patience=swarm.patience,
        lost_seconds=swarm.lost_seconds,
        quorum=swarm.quorum,
        minority_seconds=60.0 * swarm.minority_minutes,
        timeout_seconds=config.sync.timeout_seconds,
        refusals_to_ban=swarm.refusals_to_ban,
        label=platform.node()[:48] + (f"/{slot.index}" if slot.slots > 1 else ""),
    )


class SwarmEvents:
    """Writes the engine's events to the run's log, from any thread; keeps them until this worker has a number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._log: EventLog | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, type_: str, fields: Mapping[str, Any]) -> None:
        values = {("member" if name == "number" else name): value for name, value in fields.items()}
        with self._lock:
            if self._log is None:
                self._early.append((type_, values))
            else:
                self._emit(self._log, type_, values)

    def write_into(self, log: EventLog) -> None:
        """Write the events so far into the log, and each later one as it comes."""
        with self._lock:  # until all are written: a member that leaves now has joined before
            self._log = log
            for type_, fields in self._early:  # members met before this worker had its number were there already
                self._emit(log, type_, fields | ({"already": True} if type_ == "member_joined" else {}))

    def _emit(self, log: EventLog, type_: str, fields: dict[str, Any]) -> None:
        event = make_event(type_, fields)
        if isinstance(event, RenumberedEvent):
            log.worker = event.member
        try:
            log.emit(event)
        except OSError as error:  # a full disk must not stop the swarm's thread
            logger.error("the event '%s' was not written: %s", type_, error)


def _train(config: RunConfig, slot: SwarmSlot) -> None:
    def give_up() -> None:
        raise _Stopped

    on_stop_signals(give_up)  # finding the swarm may take a minute, and fetching its state too
    device = device_of(config, slot.index)
    own = None if slot.own_folder is None else Corpus.open(slot.own_folder)
    texts = WorkerTexts(Corpus.open(slot.corpus_folder, allow_missing_shards=True), own, slot.index, slot.slots)
    swarm_events = SwarmEvents()
    engine = SwarmEngine(settings_of(config, slot), on_event=swarm_events)
    try:
        log = EventLog(slot.run_folder, engine.worker)
        _train_as_member(config, slot, texts, engine, log, device, swarm_events)
    finally:
        engine.close()
    log.close()


def _train_as_member(
    config: RunConfig,
    slot: SwarmSlot,
    texts: WorkerTexts,
    engine: SwarmEngine,
    log: EventLog,
    device: torch.device,
    swarm_events: SwarmEvents,
) -> None:
    files = corpus_files(texts.shared)
    files[RUN_JSON] = slot.run_folder / SWARM_FOLDER / RUN_JSON
    engine.serve_files(files)
    me = next(member for member in engine.status().members if member.number == engine.worker)
    founded = me.has_state  # no member answered: this worker starts the swarm, or restarts it
    start = newest_start(slot.run_folder) if founded else None
    saved = start is not None and start.checkpoint is not None
    place: dict[str, Any] = {"run": engine.status().run, "peer": me.peer, "addresses": list(me.addresses)}
    log.emit(SwarmEvent(name=slot.name, founded=founded, going_on=saved, **place))
    swarm_events.write_into(log)
    cores = SharedCores(torch.set_num_threads, log.emit, fixed=_chosen_threads(config), folder=registry())
    cores.begin(slot.slots)
    engine.pause_serving_state(saved)  # until it is the saved one
    if slot.index == 0:
        emit_sizes(config, texts.shared.vocab_size, engine, device, slot.slots, log.emit, slot.run_folder)
    if not founded and config.sync.warm_start:
        wait_for_warm_start(engine.status, config.sync.warm_start, log.emit)
    training = SwarmTraining(
        config, texts, engine, log, device, slot.run_folder, leader=slot.index == 0, sharing=sharing(slot.slots)
    )
    training.joined = not founded
    if start is not None and saved:
        training.resume(start)
    engine.pause_serving_state(False)
    training.after_step = cores.update

    def stop() -> None:
        training.request_stop()
        engine.leave_soon()

    on_stop_signals(stop)
    run_training(training)


def _chosen_threads(config: RunConfig) -> int | None:
    """Return the CPU threads that the user has chosen: by option, or by the variable that torch has read."""
    if config.threads is None and os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    return config.threads


def wait_for_warm_start(status: Callable[[], RunStatus], steps: int, emit: Emit) -> None:
    """Wait until a live member with the state is past the warm start's `steps`, or none is left that has it.

    The wait for the state itself is the engine's, which asks for it until there is one and gives up if no member is
    left that could have it. This comes first: it follows how far the member is that trains the warm start.
    """
    emitted_at = -math.inf
    while True:
        positions = [member.position for member in status().members if member.live and member.has_state]
        if not positions or max(positions) >= steps:
            return
        if time.monotonic() - emitted_at >= _WARM_START_EVENT_SECONDS:
            emitted_at = time.monotonic()
            emit(WarmStartEvent(step=max(positions), steps=steps))
        time.sleep(_WARM_START_POLL_SECONDS)
