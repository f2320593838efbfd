"""Averaging in a swarm: workers anywhere on the internet that join, leave and die while the others train.

The swarm itself is in a process beside this one (swarm/sidecar.py): a transfer never holds the trainer's GIL, and
no process outlives the trainer. Here is the trainer's end: encoded vectors go through shared memory, everything else
as messages over the link. When the sidecar dies it is started again and rejoins; rounds in flight then fail, as any
round may. Hivemind is needed by the sidecar only.

A vector is copied into shared memory when its round is posted and back when it has ended; whoever trains may use its
memory meanwhile. Linux only.
"""

import atexit
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diloco.engines.base import Engine, PendingRound
from diloco.engines.header import Header, pack
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult
from diloco.engines.swarm.installed import check_swarm
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.shared_memory import SharedMemory
from diloco.engines.swarm.sidecar import messages as say
from diloco.engines.swarm.sidecar import snapshots
from diloco.engines.swarm.sidecar.supervisor import COMMAND, KeptSidecar, SidecarLost
from diloco.errors import DiLoCoError, EngineError, Excluded, RoundFailed

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
_JOIN_SECONDS = 6 * 3600.0  # a large state may come over a slow line; the sidecar itself sees when nothing comes
_GRACE_SECONDS = 5.0  # that the sidecar has after a deadline, to say so itself
_PROGRESS_SECONDS = 0.5
_LAST_ROUND_SECONDS = 10.0
_LOOK_UP_SECONDS = 0.5

OnEvent = Callable[[str, Mapping[str, Any]], None]


class SwarmEngine(Engine):
    """One worker of a swarm. Its number (`worker`) is nobody else's; `workers` is how many there are at the moment."""

    elastic = True

    def __init__(
        self,
        settings: Settings,
        *,
        on_event: OnEvent | None = None,
        start_seconds: float = START_SECONDS,
        command: Sequence[str] | None = None,
    ) -> None:
        """Founds or joins the swarm; raises what stands in the way, in one sentence.

        `on_event` hears of joins, leaves, refusals and lost sidecars, in a thread of the engine's: it must not wait.
        `command` starts the sidecar, for tests.
        """
        if command is None:
            check_swarm()
        self.settings = settings
        self.log = Path(settings.folder).parent / "logs" / f"{settings.seat}-swarm.log"
        self._on_event = on_event
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._workers = 1
        self._members: tuple[Member, ...] = ()
        self._called = -1
        self._joined = False  # this worker has had a state once
        self._known = 0  # how many sidecars had been lost when this worker last had the others' state
        self._files: dict[str, str] = {}
        self._told_progress = 0.0
        self.leaves_at = math.inf  # then a round that has not ended is given up; see `leave_soon`
        self._provider: snapshots.Provider | None = None
        self._free: dict[tuple[int, int], list[tuple[SharedMemory, SharedMemory]]] = {}
        self._sidecar = KeptSidecar(settings, self.log, self._hear, self._tell_event, command or COMMAND)
        self._sidecar.held = self._held
        self._snapshots = snapshots.SnapshotMaker(self._sidecar.tell)
        self.worker = self._sidecar.start(start_seconds)
        atexit.register(self.close)  # a script that forgets it leaves the others all the same

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self._workers

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of every worker a single rank: one lane, whoever comes or goes meanwhile."""
        return (1,)

    def lanes(self, owners: Sequence[tuple[int, ...]]) -> "list[Engine | None]":
        assert list(owners) == [(0,)]
        return [self]

    def wanted(self, sequence: int) -> bool:
        return sequence <= self._called

    def members(self) -> tuple[Member, ...]:
        return self._members

    # Rounds

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        self._snapshots.changed()
        if self._sidecar.losses > self._known:  # rounds may have ended without this worker
            return _Failed(RoundFailed(f"round {key.sequence}: the swarm's process was lost", resync=True))
        vector = contribution.vector
        seconds = min(deadline_seconds, self.settings.timeout_seconds)
        memory = self._memory(key.fragment, vector.num_bytes)
        if vector.num_bytes:
            _as_tensor(memory[0]).copy_(vector.data.view(-1))
        number = self._sidecar.number()
        message = say.Post(
            number=number,
            sequence=key.sequence,
            fragment=key.fragment,
            header=pack(key, contribution),
            note=contribution.note,
            codec=vector.codec.name,
            part_elements=vector.layout.part_elements,
            num_parts=vector.data.shape[0],
            part_bytes=vector.data.shape[1],
            contribution=memory[0],
            mean=memory[1],
            max_norm_ratio=contribution.max_norm_ratio,
            deadline_seconds=seconds,
        )
        return _SwarmRound(self, contribution, memory, message, self._sidecar.ask(message, number))

    def _memory(self, fragment: int, size: int) -> tuple[SharedMemory, SharedMemory]:
        """For a contribution and its mean: what an earlier round of this fragment used, if it has ended."""
        with self._lock:
            free = self._free.get((fragment, size))
            if free:
                return free.pop()
        return SharedMemory.create(size), SharedMemory.create(size)

    def ended(self, key: RoundKey, memory: tuple[SharedMemory, SharedMemory], roster: Sequence[int]) -> None:
        """A round is over, and nobody writes into its memory any more."""
        self._snapshots.changed()
        with self._lock:
            self._free.setdefault((key.fragment, memory[0].num_bytes), []).append(memory)
        if roster:
            self._workers = len(roster)

    def heard(self, members: tuple[Member, ...]) -> None:
        self._members = members

    def give_up(self, number: int, reason: str) -> None:
        """The sidecar lives but does not do what it was asked: another one must."""
        logger.warning("%s: the swarm's process is started again", reason)
        self._sidecar.forget(number)
        self._sidecar.kill()

    # States

    def serve_state(self, provider: snapshots.Provider) -> None:
        self._provider = provider
        self._snapshots.serve(provider)

    def hold_back(self, held: bool) -> None:
        """Nobody gets this worker's state for now: it is about to be another (a saved one, say)."""
        self._snapshots.held_back = held

    def fetch_state(self) -> GlobalState | None:
        seconds = self.settings.timeout_seconds if self._joined else _JOIN_SECONDS
        answer, losses = self._ask_until_answered(lambda number: say.FetchState(number), "the others' state", seconds)
        assert isinstance(answer, say.StateFetched)
        self._joined, self._known = True, losses
        if answer.holds:
            return None
        told = answer.means or []
        means = snapshots.rows(answer.means_memory, [size for _, _, size in told])
        first = (answer.numbers or {}).get("sequence", 0)
        since = [(RoundKey(s, f), mean) for (s, f, _), mean in zip(told, means, strict=True)]
        return GlobalState(
            {} if answer.memory is None else snapshots.read(answer.memory),
            {**(answer.numbers or {}), "sequence": answer.sequence},
            answer.layout_digest,
            means=tuple((key, mean) for key, mean in since if key.sequence >= first),
            position=answer.position,
            note=answer.note,
        )

    def _held(self) -> int | None:
        """The first round that is not in this worker's state; None where it has none that is sound."""
        if self._provider is None or not self._joined:
            return None
        try:
            return self._provider().numbers["sequence"]
        except RoundFailed:
            return None

    # Files, and what is told of this worker

    def serve_files(self, files: Mapping[str, Path]) -> None:
        """Others may download these, by name; the latest call counts."""
        self._files = {name: str(path) for name, path in files.items()}
        self._sidecar.tell(say.ServeFiles(self._files))

    def fetch_file(self, name: str, path: Path) -> None:
        """From any member that has it; the file is there whole, or not at all."""
        self._ask_until_answered(lambda number: say.FetchFile(number, name, str(path)), name, _JOIN_SECONDS)

    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float) -> None:
        """What the others are told of this worker between rounds; cheap enough for every step."""
        now = time.monotonic()
        if now - self._told_progress >= _PROGRESS_SECONDS:
            self._told_progress = now
            self._sidecar.tell(say.Progress(inner_steps, tokens, loss, step_seconds), seconds=0.0)

    def status(self) -> dict[str, Any]:
        """What the node last said of itself and of the others."""
        return self._status

    @property
    def roster(self) -> tuple[int, ...]:
        """The numbers of all that are here and have the state."""
        members = self._status.get("members", ())
        return tuple(one["number"] for one in members if one["live"] and one["holds"] and one["number"] >= 0)

    def _ask_until_answered(self, request: Callable[[int], say.Message], what: str, seconds: float) -> tuple[Any, int]:
        """Asks again when the sidecar was lost meanwhile. Also tells how many had been lost when it asked."""
        deadline = time.monotonic() + seconds
        while True:
            number, losses = self._sidecar.number(), self._sidecar.losses
            answer = self._sidecar.ask(request(number), number)
            try:
                return answer.result(max(0.0, deadline - time.monotonic())), losses
            except SidecarLost as lost:
                logger.warning("%s; asking again", lost)
            except TimeoutError:
                self.give_up(number, f"{what} did not come")
                raise RoundFailed(
                    f"{what} did not come within {seconds:g} s: can the others be reached? See {self.log}"
                ) from None

    def leave_soon(self) -> None:
        """From now on rounds in flight have some seconds left; may be called from a signal handler."""
        self.leaves_at = min(self.leaves_at, time.monotonic() + _LAST_ROUND_SECONDS)

    def close(self) -> None:
        """Tell the others, and end the sidecar; in a few seconds, whatever happens."""
        atexit.unregister(self.close)
        self._sidecar.close()
        self._snapshots.close()
        with self._lock:
            self._free.clear()

    # What the sidecar says, in its thread

    def _hear(self, message: say.Message) -> None:
        match message:
            case say.Status():
                self._status = message.values
                live = [one for one in message.values.get("members", ()) if one["live"] and one["number"] >= 0]
                self._workers = max(1, len(live))
            case say.Called():
                self._called = max(self._called, message.sequence)
            case say.SnapshotWanted():
                self._snapshots.want(message.number)
            case say.Happened():
                self._tell_event(message.type, message.fields)
            case say.Started():
                self._started(message)
            case _:
                raise EngineError(f"a sidecar does not say {type(message).__name__}")

    def _started(self, message: say.Started) -> None:
        self.worker = message.worker
        self._sidecar.tell(say.ServeFiles(self._files))

    def _tell_event(self, type_: str, fields: Mapping[str, Any]) -> None:
        if type_ == "sidecar_lost":
            logger.warning("the swarm's process was lost (%s), and is started again", fields["reason"])
        if self._on_event is not None:
            try:
                self._on_event(type_, fields)
            except Exception:
                logger.exception("an event (%s) could not be told", type_)


class _Leaving(Exception): ...


class _Failed(PendingRound):
    def __init__(self, failure: RoundFailed) -> None:
        self._failure = failure

    def wait(self) -> RoundResult:
        raise self._failure


class _SwarmRound(PendingRound):
    def __init__(
        self,
        engine: SwarmEngine,
        contribution: Contribution,
        memory: tuple[SharedMemory, SharedMemory],
        posted: say.Post,
        answer: "Future[Any]",
    ) -> None:
        self._engine, self._contribution = engine, contribution
        self._memory: tuple[SharedMemory, SharedMemory] | None = memory
        self._key, self._number, self._answer = RoundKey(posted.sequence, posted.fragment), posted.number, answer
        self._deadline = time.monotonic() + posted.deadline_seconds + _GRACE_SECONDS
        self._outcome: RoundResult | DiLoCoError | None = None

    def wait(self) -> RoundResult:
        if self._outcome is None:
            try:
                self._outcome = self._result(self._ended())
            except DiLoCoError as error:
                self._outcome = error
            self._memory = None  # whoever keeps an exception must not keep this
        if isinstance(self._outcome, DiLoCoError):
            raise self._outcome
        return self._outcome

    def _ended(self) -> say.RoundEnded:
        """Memory of a round that ended otherwise is not used again: the sidecar may still write into it."""
        try:
            ended = self._awaited()
        except _Leaving:
            raise self._failed("this worker leaves, and it had not ended", resync=False) from None
        except SidecarLost as lost:
            raise self._failed(str(lost), resync=True) from lost
        except RoundFailed as failure:
            raise self._failed(failure.reason, resync=True) from failure
        except TimeoutError:
            reason = "the swarm's process did not end it in time"
            self._engine.give_up(self._number, f"round {self._key.sequence}: {reason}")
            raise self._failed(reason, resync=True) from None
        assert isinstance(ended, say.RoundEnded)
        return ended

    def _awaited(self) -> object:
        """The answer; looks up now and then, since this worker may be asked to leave meanwhile."""
        while True:
            now = time.monotonic()
            if now >= self._engine.leaves_at:
                raise _Leaving
            try:
                return self._answer.result(max(0.0, min(_LOOK_UP_SECONDS, self._deadline - now)))
            except TimeoutError:
                if time.monotonic() >= self._deadline:
                    raise

    def _failed(self, reason: str, *, resync: bool) -> RoundFailed:
        prefix = f"round {self._key.sequence}: "
        return RoundFailed(reason if reason.startswith(prefix) else prefix + reason, resync=resync)

    def _result(self, ended: say.RoundEnded) -> RoundResult:
        vector = self._contribution.vector
        assert self._memory is not None
        if ended.failure is None and ended.total_weight > 0 and vector.num_bytes:
            vector.data.view(-1).copy_(_as_tensor(self._memory[1]))
        self._engine.ended(self._key, self._memory, ended.roster)
        members = tuple(_member(*one) for one in ended.present)
        if members:
            self._engine.heard(members)
        if ended.fatal:
            raise Excluded(ended.failure or "the swarm has no place for this worker")
        if ended.failure is not None:
            failure = self._failed(ended.failure, resync=ended.resync)
            failure.stopping = any(member.report.stopping for member in members)
            raise failure
        return RoundResult(
            mean=vector,
            contributors=tuple(ended.contributors),
            refused=dict(ended.refused),
            total_weight=ended.total_weight,
            bytes_sent=ended.bytes_sent,
            bytes_received=ended.bytes_received,
            seconds=ended.seconds,
            members=members,
            resync=ended.resync,
            roster=tuple(ended.roster),
        )


def _member(worker: int, header: bytes, note: bytes) -> Member:
    try:
        return replace(Header(worker, header).member, note=note)
    except struct.error as error:
        raise EngineError(
            f"worker {worker} speaks another protocol: run the same version of diloco everywhere"
        ) from error


def _as_tensor(memory: SharedMemory) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=memory.num_bytes)
