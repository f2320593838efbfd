"""A worker process of a swarm, or of a bucket: joins the run or begins it, builds its training, runs it, and leaves."""

import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from diloco.data.corpus import Corpus
from diloco.data.preparation.received_corpus import corpus_files
from diloco.engines.connect import join
from diloco.engines.first_rank import FirstRankEngine, connect_first
from diloco.engines.ranked import ranks_of_one_worker
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import CheckpointError, EngineError
from diloco.history.events import Emit, RenumberedEvent, SwarmEvent, WarmStartEvent, make_event
from diloco.history.log import EventLog, NoEvents
from diloco.swarm.network.listening import choose_port
from diloco.swarm.protocol.status import RunStatus
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.swarm.settings import Settings
from diloco.training.batches import WorkerTexts
from diloco.training.checkpoints.resume import Start, newest_start
from diloco.training.config.run import RunConfig
from diloco.training.processes.cores import SharedCores, registry
from diloco.training.processes.local_process import SwarmSlot
from diloco.training.processes.worker import START_SECONDS, check_devices, device_of, on_stop_signals, run_training
from diloco.training.records.run_description import RUN_JSON
from diloco.training.sizes.estimate import emit_sizes, sharing
from diloco.training.swarm.training import SwarmTraining

if TYPE_CHECKING:
    from diloco.bucket.engine import BucketEngine
    from diloco.bucket.settings import BucketSettings
    from diloco.swarm.engine import SwarmEngine

    Membership = SwarmEngine | BucketEngine

logger = logging.getLogger(__name__)

_WARM_START_POLL_SECONDS = 0.2
_WARM_START_EVENT_SECONDS = 60.0


class _Stopped(BaseException):
    """A stop request before the first inner step: there is nothing to save."""


def train_swarm_worker(config: RunConfig, slot: SwarmSlot) -> None:
    """Join the swarm or found it, train, and leave."""
    stopped = threading.Event()
    try:
        _train(config, slot, stopped)
    except _Stopped:
        logger.info("stopped before the first step")
    except EngineError:
        if not stopped.is_set():
            raise
        logger.info("stopped before the first step, after another rank of this worker")


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
        label=_label(slot),
    )


def bucket_settings_of(config: RunConfig, slot: SwarmSlot) -> "BucketSettings":
    """Return the settings of this worker's engine in a bucket."""
    from diloco.bucket.engine import settings_for

    assert config.bucket is not None
    return settings_for(
        config.bucket,
        slot.run_folder.absolute() / SWARM_FOLDER,
        name=slot.name,
        label=_label(slot),
        timeout_seconds=config.sync.timeout_seconds,
        patience=config.swarm.patience,
    )


def _label(slot: SwarmSlot) -> str:
    """Return the name of this worker in `diloco status`."""
    return platform.node()[:48] + (f"/{slot.index}" if len(slot.ranks_of_workers) > 1 else "")


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


def _train(config: RunConfig, slot: SwarmSlot, stopped: threading.Event) -> None:
    """Train from the search for the swarm on. `stopped` is set if a stop is asked for before the first inner step."""

    def give_up() -> None:
        stopped.set()
        raise _Stopped

    on_stop_signals(give_up)  # finding the swarm may take a minute, and fetching its state too
    device = device_of(config, slot.process)
    own = None if slot.own_folder is None else Corpus.open(slot.own_folder)
    texts = WorkerTexts(
        Corpus.open(slot.corpus_folder, allow_missing_shards=True), own, slot.index, len(slot.ranks_of_workers)
    )
    swarm_events = SwarmEvents()
    engine: Membership | FirstRankEngine
    if slot.ranks == 1:
        engine = _engine(config, slot, swarm_events)
    else:
        engine = _join_together(config, slot, swarm_events)
    try:
        check_devices(device, engine.ranks)
        log = EventLog(slot.run_folder, engine.worker) if slot.rank == 0 else NoEvents()
        _train_as_member(config, slot, texts, engine, log, device, swarm_events)
    finally:
        engine.close()
    log.close()


def _join_together(config: RunConfig, slot: SwarmSlot, swarm_events: SwarmEvents) -> FirstRankEngine:
    """Meet the other ranks of this worker, of which the first joins the swarm."""
    from diloco.swarm.engine import SwarmEngine

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = FileStore(str(slot.rendezvous), slot.ranks)
    join(str(slot.rendezvous), meeting, slot.rank, slot.ranks, START_SECONDS)
    return connect_first(
        lambda: SwarmEngine(settings_of(config, slot), on_event=swarm_events),
        ranks_of_one_worker(),
        dist.destroy_process_group,
    )


def _engine(config: RunConfig, slot: SwarmSlot, events: SwarmEvents) -> "Membership":
    """Return the engine of this worker, in the swarm or bucket of the run; its packages are those of an extra."""
    if config.engine == "bucket":
        from diloco.bucket.engine import BucketEngine

        return BucketEngine(bucket_settings_of(config, slot), on_event=events)
    from diloco.swarm.engine import SwarmEngine

    return SwarmEngine(settings_of(config, slot), on_event=events)


def _train_as_member(
    config: RunConfig,
    slot: SwarmSlot,
    texts: WorkerTexts,
    engine: "Membership | FirstRankEngine",
    log: EventLog,
    device: torch.device,
    swarm_events: SwarmEvents,
) -> None:
    swarm = cast("Membership | None", engine.first) if isinstance(engine, FirstRankEngine) else engine
    founded, start = _agree_on_start(slot, texts, swarm, engine.ranks, log, swarm_events)
    cores = SharedCores(torch.set_num_threads, log.emit, fixed=_chosen_threads(config), folder=registry())
    cores.begin(slot.processes)
    if slot.index == 0:
        emit_sizes(config, texts.shared.vocab_size, engine, device, slot.processes, log.emit, slot.run_folder)
    if not founded and config.sync.warm_start:
        _wait_for_warm_start(engine, swarm, config.sync.warm_start, log.emit)
    training = SwarmTraining(
        config, texts, engine, log, device, slot.run_folder, leader=slot.index == 0, sharing=sharing(slot.processes)
    )
    training.joined = not founded
    if start is not None:
        training.resume(start)
    if swarm is not None:
        swarm.pause_serving_state(False)
    training.after_step = cores.update

    def stop() -> None:
        training.request_stop()
        if swarm is not None:
            swarm.leave_soon()

    on_stop_signals(stop)
    run_training(training)


def _agree_on_start(
    slot: SwarmSlot,
    texts: WorkerTexts,
    swarm: "Membership | None",
    ranks: WorkerRanks,
    log: EventLog,
    swarm_events: SwarmEvents,
) -> tuple[bool, Start | None]:
    """Return whether no member answered, so that this worker starts the swarm or restarts it; and from which of its
    checkpoints, if it has one. What the first rank finds counts."""
    folder = ""
    founded = False
    if swarm is not None:
        files = corpus_files(texts.shared)
        files[RUN_JSON] = slot.run_folder / SWARM_FOLDER / RUN_JSON
        swarm.serve_files(files)
        me = next(member for member in swarm.status().members if member.number == swarm.worker)
        founded = me.has_state
        folder = _folder_of(newest_start(slot.run_folder)) if founded else ""
        place: dict[str, Any] = {"run": swarm.status().run, "peer": me.peer, "addresses": list(me.addresses)}
        log.emit(SwarmEvent(name=slot.name, founded=founded, going_on=bool(folder), **place))
        swarm_events.write_into(log)
        swarm.pause_serving_state(bool(folder))  # until it is the saved one
    founded, folder = json.loads(ranks.tell(json.dumps([founded, folder]).encode()))
    if not folder:
        return founded, None
    start = newest_start(slot.run_folder)
    if _folder_of(start) != folder:
        raise CheckpointError(f"{slot} finds {_folder_of(start)} to start from, and the first rank has found {folder}")
    return founded, start


def _folder_of(start: Start) -> str:
    return "" if start.checkpoint is None else str(start.checkpoint.folder)


def _wait_for_warm_start(
    engine: "Membership | FirstRankEngine", swarm: "Membership | None", steps: int, emit: Emit
) -> None:
    def wait() -> None:
        assert swarm is not None
        wait_for_warm_start(swarm.status, steps, emit)

    if isinstance(engine, FirstRankEngine):
        engine.wait_for_first(wait)
    else:
        wait()


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
