"""Averaging in a swarm: workers anywhere on the internet that join, leave and die while the others train.

The swarm's node runs in a process of its own, the sidecar (sidecar/process.py): transfers never hold the trainer's GIL.
This is the trainer's side: encoded vectors go through shared memory, everything else as messages over the link. A
sidecar that dies is restarted and rejoins the swarm; rounds in flight then fail. Only the sidecar imports Hivemind.
Linux only.
"""

import atexit
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diloco.engines.base import Engine, PendingRound
from diloco.engines.header import pack
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey
from diloco.errors import EngineError, RoundFailed
from diloco.swarm import timing
from diloco.swarm.installed import check_swarm
from diloco.swarm.pending_round import FailedRound, RoundMemoryPool, SwarmRound, as_tensor
from diloco.swarm.protocol.status import RunStatus
from diloco.swarm.settings import Settings
from diloco.swarm.sidecar import messages, snapshots
from diloco.swarm.sidecar.messages import FromSidecar
from diloco.swarm.sidecar.supervisor import COMMAND, Request, SidecarLost, SidecarSupervisor
from diloco.swarm.trainer import PostedRound, RoundOutcome

logger = logging.getLogger(__name__)


OnEvent = Callable[[str, Mapping[str, Any]], None]


class SwarmEngine(Engine):
    """One worker of a swarm. Its number (`worker`) is unique; `workers` is the number of workers at the moment."""

    elastic = True

    def __init__(
        self,
        settings: Settings,
        *,
        on_event: OnEvent | None = None,
        start_seconds: float = timing.ENGINE_START_SECONDS,
        command: Sequence[str] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Founds or joins the swarm; raises a DiLoCoError that says why it cannot.

        `on_event(type, fields)` is called for joins, leaves, refusals and lost sidecars, in a thread of the engine: it
        must not wait. `command` starts the sidecar, for tests. `on_close` is called once, when the engine is closed.
        """
        if command is None:
            check_swarm()
        self.settings = settings = replace(settings, threads=torch.get_num_threads())
        self.log = Path(settings.folder).parent / "logs" / f"{settings.name}-swarm.log"
        self._on_event = on_event
        self._on_close = on_close
        self._status = RunStatus("", (), None, {}, {})
        self._workers = 1
        self._members: tuple[Member, ...] = ()
        self._due_round = -1  # the latest round that the others wait for no longer
        self._has_state = False  # this worker has had the run's state once
        self._sidecar_losses_handled = 0  # the number of lost sidecars when this worker last fetched the others' state
        self._files: dict[str, str] = {}
        self._progress_sent_at = 0.0
        self.leave_deadline = math.inf  # see `leave_soon`
        self._memory = RoundMemoryPool()
        self._sidecar = SidecarSupervisor(
            settings, self.log, self._on_message, self._emit, self._next_round, command or COMMAND
        )
        self._snapshots = snapshots.SnapshotMaker(self._sidecar.send)
        self.worker = self._sidecar.start(start_seconds)
        atexit.register(self.close)  # a script that does not close it leaves the swarm properly all the same

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self._workers

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Every worker has a single rank: there is one lane, however many workers there are."""
        return (1,)

    def lanes(self, owners: Sequence[tuple[int, ...]]) -> "list[Engine | None]":
        assert list(owners) == [(0,)]
        return [self]

    def wanted(self, sequence: int) -> bool:
        return sequence <= self._due_round

    def members(self) -> tuple[Member, ...]:
        return self._members

    # Rounds

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        self._snapshots.invalidate()
        if self._sidecar.times_lost > self._sidecar_losses_handled:  # rounds may have ended without this worker
            return FailedRound(RoundFailed(f"round {key.sequence}: the swarm's process was lost", resync=True))
        vector = contribution.vector
        on_gpu = vector.device.type == "cuda"
        memory = self._memory.take(key.fragment, vector.num_bytes, vector.mean.num_bytes, pinned=on_gpu)
        as_tensor(memory.contribution).copy_(vector.data.view(-1))
        posted = PostedRound(
            key=key,
            header=pack(key, contribution),
            note=contribution.note,
            codec=vector.codec.name,
            part_elements=vector.layout.part_elements,
            num_parts=vector.shape[0],
            contribution=memory.contribution,
            mean=memory.mean,
            max_norm_ratio=contribution.max_norm_ratio,
            deadline_seconds=min(deadline_seconds, self.settings.timeout_seconds),
            merge=contribution.merge,
        )
        message = messages.PostRound(self._sidecar.new_number(), posted)
        return SwarmRound(self, contribution, message, self._sidecar.request(message))

    def on_round_ended(self, posted: PostedRound, outcome: RoundOutcome, members: tuple[Member, ...]) -> None:
        self._snapshots.invalidate()
        self._memory.give_back(posted)
        if outcome.roster:
            self._workers = len(outcome.roster)
        if members:
            self._members = members

    def restart_sidecar(self, number: int, reason: str) -> None:
        """The sidecar runs, but does not answer request `number`."""
        logger.warning("%s: the swarm's process is restarted", reason)
        self._sidecar.forget(number)
        self._sidecar.kill()

    # States

    def serve_state(self, provider: snapshots.Provider) -> None:
        self._snapshots.serve(provider)

    def pause_serving_state(self, paused: bool) -> None:
        """While paused, no other worker gets this one's state: it is about to be replaced by a saved one."""
        self._snapshots.paused = paused

    def fetch_state(self) -> GlobalState | None:
        seconds = self.settings.timeout_seconds if self._has_state else timing.FETCH_STATE_SECONDS
        answer, losses = self._request_until_answered(
            lambda number: messages.FetchState(number, self.most_state_bytes), "the others' state", seconds
        )
        assert isinstance(answer, messages.StateFetched)
        self._has_state = True
        self._sidecar_losses_handled = losses
        state = answer.state
        if state is None:
            return None
        snapshot = state.snapshot
        first = 0 if snapshot is None else snapshot.numbers["sequence"]
        means = tuple((mean.key, as_tensor(mean.data)) for mean in state.means if mean.key.sequence >= first)
        plain = frozenset(mean.key.sequence for mean in state.means if mean.plain)
        if snapshot is None:
            numbers = {"sequence": state.sequence}
            return GlobalState({}, numbers, "", means=means, plain=plain, position=state.position)
        return GlobalState(
            snapshots.read(snapshot.data),
            {**snapshot.numbers, "sequence": state.sequence},
            snapshot.layout_digest,
            means=means,
            plain=plain,
            position=state.position,
            note=snapshot.note,
        )

    def _next_round(self) -> int | None:
        """Return the first round that is not in this worker's state; None if it has no usable state."""
        return None if self.next_round is None or not self._has_state else self.next_round()

    # Files, progress and status

    def serve_files(self, files: Mapping[str, Path]) -> None:
        """Let other workers download these, by name; replaces the files of an earlier call."""
        self._files = {name: str(path) for name, path in files.items()}
        self._sidecar.send(messages.ServeFiles(self._files))

    def fetch_file(self, name: str, path: Path) -> None:
        """Download it from any member that has it; `path` then holds the whole file, or does not exist."""
        self._request_until_answered(
            lambda number: messages.FetchRunFile(number, name, str(path)), name, timing.FETCH_STATE_SECONDS
        )

    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float, run_tokens: int = 0) -> None:
        now = time.monotonic()
        if now - self._progress_sent_at >= timing.PROGRESS_SECONDS:
            self._progress_sent_at = now
            self._sidecar.send(
                messages.ReportProgress(inner_steps, tokens, loss, step_seconds, run_tokens), seconds=0.0
            )

    def status(self) -> RunStatus:
        """Return the node's latest status: the run and its members."""
        return self._status

    @property
    def roster(self) -> tuple[int, ...]:
        """The numbers of all live workers that have the state."""
        members = self._status.members
        return tuple(member.number for member in members if member.live and member.has_state and member.number >= 0)

    def _request_until_answered(self, request: Callable[[int], Request], what: str, seconds: float) -> tuple[Any, int]:
        """Repeats the request if the sidecar is lost. Also returns how many sidecars had been lost at the request."""
        deadline = time.monotonic() + seconds
        while True:
            number = self._sidecar.new_number()
            losses = self._sidecar.times_lost
            answer = self._sidecar.request(request(number))
            try:
                return answer.result(max(0.0, deadline - time.monotonic())), losses
            except SidecarLost as lost:
                logger.warning("%s; repeating the request for %s", lost, what)
            except TimeoutError:
                self.restart_sidecar(number, f"{what} did not arrive")
                raise RoundFailed(
                    f"{what} did not arrive within {seconds:g} s: can the others be reached? See {self.log}"
                ) from None

    def leave_soon(self) -> None:
        """Give rounds in flight ten more seconds. May be called from a signal handler."""
        self.leave_deadline = min(self.leave_deadline, time.monotonic() + timing.LAST_ROUND_SECONDS)

    def close(self) -> None:
        """Tell the others that this worker leaves, and end the sidecar; takes a few seconds at most."""
        atexit.unregister(self.close)
        self.closed = True
        self._sidecar.close()
        self._snapshots.close()
        self._memory.clear()
        on_close = self._on_close
        self._on_close = None
        if on_close is not None:
            on_close()

    # Messages of the sidecar, in the supervisor's thread

    def _on_message(self, message: FromSidecar) -> None:
        match message:
            case messages.StatusReport():
                if message.status is not None:
                    self._status = message.status
                    numbered = [member.live and member.number >= 0 for member in message.status.members]
                    self._workers = max(1, sum(numbered))
            case messages.PostAtOnce():
                self._due_round = max(self._due_round, message.sequence)
            case messages.MakeSnapshot():
                self._snapshots.request(message.number)
            case messages.NodeEvent():
                if message.type == "excluded":
                    self.excluded = str(message.fields["reason"])
                if message.type == "renumbered":
                    self.worker = int(message.fields["number"])
                self._emit(message.type, message.fields)
            case messages.Started():
                self.worker = message.worker
                self._sidecar.send(messages.ServeFiles(self._files))
            case _:
                raise EngineError(f"a {type(message).__name__} of the sidecar has no request that it answers")

    def _emit(self, type_: str, fields: Mapping[str, Any]) -> None:
        if type_ == "sidecar_lost":
            logger.warning("the swarm's process was lost (%s), and is restarted", fields["reason"])
        if self._on_event is not None:
            try:
                self._on_event(type_, fields)
            except Exception:
                logger.exception("on_event failed for an event of type %s", type_)
