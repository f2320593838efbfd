"""Averaging over a bucket: an object store, or a shared folder, that all workers can reach, and nothing else.

Workers come and go as in a swarm, without open ports, a daemon or a leader: what a round's mean is, the objects in the
bucket say (node.py, records.py). Requests, hashing and reduction run in an event loop and threads beside training; none
of them holds the GIL for long. Access to the bucket is membership.
"""

import asyncio
import atexit
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.bucket.node import Node
from diloco.bucket.records import VectorEncoding
from diloco.bucket.rounds import BucketRoundEnd, PostedRound
from diloco.bucket.settings import BucketSettings
from diloco.bucket.store import ObjectStore, Store, StoreUnavailable, check_installed, let_threads_end
from diloco.codecs.encoded import EncodedVector
from diloco.core.merging import diverged
from diloco.engines.base import Engine, PendingRound
from diloco.engines.header import check_same_layout, pack
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult
from diloco.errors import ConfigError, EngineError, RoundFailed
from diloco.run_lock import hold_alone
from diloco.swarm.protocol.status import RunStatus

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, Any]], None]
T = TypeVar("T")

_START_SECONDS = 120.0
_STATE_SECONDS = 3600.0
"""The longest time that a joiner waits for the first state of a run: the warm start of another worker is in it."""
_LEAVE_SECONDS = 10.0
_GRACE_SECONDS = 60.0
"""A round that does not end this long after its deadline is a fault of this program."""


class BucketEngine(Engine):
    """One worker of a run in a bucket. Its number (`worker`) is unique; `workers` is how many there are now."""

    elastic = True
    excluded: str | None = None
    """No worker is excluded: access to the bucket is membership."""

    def __init__(
        self, settings: BucketSettings, *, on_event: OnEvent | None = None, store: Store | None = None
    ) -> None:
        """Found the run or join it. `on_event(type, fields)` is called in a thread of the engine: it must not wait."""
        if store is None:
            check_installed()
            store = ObjectStore(settings.url, dict(settings.options))
        self.settings = settings
        self._on_event = on_event
        self._members: tuple[Member, ...] = ()
        self._provider: Callable[[], GlobalState] | None = None
        self._joined = False
        self.leave_deadline = math.inf
        self._store = store
        lock = settings.folder / f"{settings.name}.lock"
        release = hold_alone(lock)
        if release is None:
            raise ConfigError(
                f"another process is worker {settings.name!r} of {settings.folder} ({lock} is held): give each worker "
                "of a machine a name, or a folder, of its own"
            )
        self._release = release
        self._loop = asyncio.new_event_loop()
        self._loop_ends = asyncio.Event()
        self._node = Node(store, settings, self._emit, self._loop.time)
        self._thread = threading.Thread(target=self._run_loop, name="diloco-bucket", daemon=True)
        self._thread.start()
        try:
            self.ask(self._node.start(), _START_SECONDS, "the start of this worker in the bucket")
        except BaseException:
            self._end_loop()
            raise
        self.worker = self._node.members.own
        atexit.register(self.close)

    # The event loop

    def ask(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Run `work` in the event loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise EngineError(f"{what} took more than {seconds:g} s: can {self.settings.url} be reached?") from None
        except StoreUnavailable as problem:
            raise EngineError(f"{what} failed: {problem}") from problem

    def _run_loop(self) -> None:
        """The body of the thread, until `_end_loop`: what still runs then is cancelled."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._loop_ends.wait())

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop_ends.set)
        self._thread.join(_LEAVE_SECONDS)
        let_threads_end()
        self._release()

    # BucketMembers

    @property
    def workers(self) -> int:  # type: ignore[override]
        return len(self.roster)

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Every worker has a single rank: there is one lane, however many workers there are."""
        return (1,)

    def lanes(self, owners: Sequence[tuple[int, ...]]) -> "list[Engine | None]":
        assert list(owners) == [(0,)]
        return [self]

    @property
    def roster(self) -> tuple[int, ...]:
        """The numbers of all live workers that have the state, and this one's."""
        members = self.status().members
        present = {member.number for member in members if member.live and member.has_state}
        return tuple(sorted(present | {self.worker}))

    def status(self) -> RunStatus:
        return self._node.members.run_status()

    def members(self) -> tuple[Member, ...]:
        return self._members

    def wanted(self, sequence: int) -> bool:
        return sequence <= self._node.rounds.due_round

    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float, run_tokens: int = 0) -> None:
        status = self._node.members.status
        status.position = inner_steps
        status.tokens = tokens
        status.run_tokens = run_tokens
        status.step_seconds = step_seconds if math.isfinite(step_seconds) else 0.0
        status.loss = loss if -1e30 < loss < 1e30 else -1.0

    # Rounds

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        vector = contribution.vector
        encoding = VectorEncoding(vector.codec.name, vector.layout.part_elements, vector.shape[0])
        on_cpu = vector.device.type == "cpu"
        posted = PostedRound(
            key=key,
            header=pack(key, contribution),
            note=contribution.note,
            encoding=encoding,
            data=vector.data if on_cpu else vector.data.cpu(),
            mean=vector.mean.data if on_cpu else torch.empty(vector.mean.shape, dtype=torch.uint8),
            max_norm_ratio=contribution.max_norm_ratio,
            merge=contribution.merge,
            deadline_seconds=deadline_seconds + contribution.patience_seconds,
        )
        future = asyncio.run_coroutine_threadsafe(self._node.take_part(posted), self._loop)
        return _BucketRound(self, contribution, posted, future)

    def take_result(self, contribution: Contribution, posted: PostedRound, ended: BucketRoundEnd) -> RoundResult:
        """The result of a round that has ended; raises RoundFailed if it has none for this worker."""
        sequence = posted.key.sequence
        plan = ended.plan
        if plan is None:
            raise RoundFailed(f"round {sequence}: {ended.failure}", resync=ended.resync)
        members = tuple(post.member for post in plan.posts)
        self._members = members
        check_same_layout({post.worker: post.parsed.layout_digest for post in plan.posts}, self.worker)
        present = [member.anchor_digest for member in members]
        own = [member.worker for member in members].index(self.worker)
        resync = own in diverged(present)
        decision = plan.decision
        if not decision.contributors and decision.refused:
            raise RoundFailed(
                f"round {sequence}: every contribution was refused: {decision.refused}",
                stopping=any(member.report.stopping for member in members),
                resync=decision.resync,
            )
        self._loop.call_soon_threadsafe(self._node.write_state_if_due)
        return RoundResult(
            mean=contribution.vector.mean,
            members=members,
            bytes_sent=ended.sent_bytes,
            bytes_received=ended.received_bytes,
            seconds=ended.seconds,
            resync=resync,
            roster=tuple(sorted({*self.roster, *(member.worker for member in members)})),
            comparison=ended.comparison,
            phases=ended.phases,
            mean_digest=ended.mean_digest,
            **decision.summary_fields(),
        )

    # States

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self._provider = provider
        self._loop.call_soon_threadsafe(self._node.serve_state, provider)

    def pause_serving_state(self, paused: bool) -> None:
        """While paused, no state is written for joiners: this worker's is about to be replaced by a saved one."""
        self._node.states.paused = paused
        if not paused:
            self._loop.call_soon_threadsafe(self._node.write_state_if_due)

    def fetch_state(self) -> GlobalState | None:
        after = None
        if self._joined and self._provider is not None:
            try:
                after = self._provider().numbers["sequence"]
            except RoundFailed:
                after = None
        seconds = self.settings.timeout_seconds if self._joined else _STATE_SECONDS
        self._node.most_state_bytes = self.most_state_bytes
        work = self._node.fetch_state(after, seconds)
        state = self.ask(work, seconds + _GRACE_SECONDS, "fetching the run's state")
        self._joined = True
        return state

    # Files

    def serve_files(self, files: Mapping[str, Path]) -> None:
        """Put these files into the bucket, by name, unless they are there."""
        self.ask(self._node.put_files(files), _STATE_SECONDS, "writing the run's files")

    def fetch_file(self, name: str, path: Path) -> None:
        """Fetch a file of the run; `path` then holds all of it, or does not exist."""
        self.ask(self._node.fetch_file(name, path), _STATE_SECONDS, f"fetching {name}")

    # The end

    def leave_soon(self) -> None:
        """Give rounds in flight ten more seconds. May be called from a signal handler."""
        self.leave_deadline = min(self.leave_deadline, time.monotonic() + _LEAVE_SECONDS)

    def close(self) -> None:
        """Tell the others that this worker leaves; takes a few seconds at most."""
        atexit.unregister(self.close)
        if self.closed:
            return
        self.closed = True
        try:
            self.ask(self._node.leave(), _LEAVE_SECONDS, "saying goodbye")
        except EngineError as problem:
            logger.info("the others will see for themselves that this worker is gone: %s", problem)
        self._end_loop()

    def _emit(self, type_: str, fields: Mapping[str, Any]) -> None:
        logger.info("%s %s", type_, dict(fields))
        if self._on_event is not None:
            self._on_event(type_, fields)


class _BucketRound(PendingRound):
    def __init__(
        self, engine: BucketEngine, contribution: Contribution, posted: PostedRound, future: "Future[BucketRoundEnd]"
    ) -> None:
        self._engine = engine
        self._contribution = contribution
        self._posted = posted
        self._future = future
        self._deadline = time.monotonic() + posted.deadline_seconds + engine.settings.timeout_seconds + _GRACE_SECONDS
        self._has_mean = False

    def arrived_mean(self) -> EncodedVector | None:
        ended = self._wait()
        if ended is None or ended.plan is None or not ended.plan.has_mean:
            return None
        self._copy_mean()
        return self._contribution.vector.mean

    def wait(self) -> RoundResult:
        ended = self._wait()
        if ended is None:
            self._future.cancel()
            raise RoundFailed(f"round {self._posted.key.sequence}: it had not ended when this worker left it")
        if ended.plan is not None and ended.plan.has_mean:
            self._copy_mean()
        return self._engine.take_result(self._contribution, self._posted, ended)

    def _copy_mean(self) -> None:
        """On a GPU, the mean is put where the worker decodes it; on a CPU it is there."""
        if not self._has_mean:
            self._has_mean = True
            mean: Tensor = self._contribution.vector.mean.data
            if mean.data_ptr() != self._posted.mean.data_ptr():
                mean.copy_(self._posted.mean.view(mean.shape))

    def _wait(self) -> BucketRoundEnd | None:
        """How the round ended; None if this worker leaves before."""
        while True:
            left = min(self._deadline, self._engine.leave_deadline) - time.monotonic()
            try:
                return self._future.result(max(0.0, min(left, 0.5)))
            except TimeoutError:
                if left <= 0:
                    return None
            except CancelledError:
                return None


def settings_for(
    url: str, folder: Path, *, name: str, label: str, timeout_seconds: float, **more: Any
) -> BucketSettings:
    """Return the settings of one worker. A shared folder costs nothing to look at: it is looked at more often."""
    is_folder = url.startswith("file://")
    return BucketSettings(
        url=url,
        folder=folder,
        name=name,
        label=label,
        timeout_seconds=timeout_seconds,
        beat_seconds=2.0 if is_folder else 10.0,
        lost_seconds=15.0 if is_folder else 40.0,
        least_poll_seconds=0.05 if is_folder else 0.3,
        **more,
    )


def connect_bucket(
    url: str,
    folder: str | Path,
    *,
    name: str = "worker-0",
    timeout_seconds: float = 600.0,
    options: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
) -> BucketEngine:
    """Make this process a worker of the run in a bucket, for a training loop of your own. Call `close()` at the end.

    `url`: s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or file:///FOLDER/RUN. `folder` keeps the worker's name
    on this machine: with the same folder it comes back under its number. Several workers of a machine share one folder,
    each with a `name` of its own. `options` go to the store: region, endpoint and so on; without them the variables of
    the environment count. `on_event(type, fields)` is called in another thread when workers join, leave or are lost.
    The schedule may jump: compute the learning rate from `optimizer.position`.
    """
    if timeout_seconds <= 0:
        raise ConfigError(f"timeout_seconds = {timeout_seconds} must be above 0")
    settings = settings_for(
        url,
        Path(folder).absolute() / "bucket",
        name=name,
        label=platform.node()[:48],
        timeout_seconds=timeout_seconds,
        options=dict(options or {}),
    )
    return BucketEngine(settings, on_event=on_event)
