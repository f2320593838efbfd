"""A worker in the event loop of its engine: number and beats, rounds, states, and what it does beside them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.bucket import rules
from diloco.bucket.files import fetch_file, put_files
from diloco.bucket.members import BucketMembers, Emit
from diloco.bucket.records import Malformed, RoundPlan
from diloco.bucket.rounds import BucketRoundEnd, PostedRound, Rounds
from diloco.bucket.settings import BucketSettings
from diloco.bucket.states import States
from diloco.bucket.store import PatientStore, Store, StoreUnavailable, check_store
from diloco.engines.rounds import GlobalState
from diloco.errors import EngineError, RoundFailed

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 30.0
"""A store that does not answer for so long at the start cannot be used."""


class Node:
    """Its coroutines run in one event loop, whose clock is `clock`."""

    def __init__(self, store: Store, settings: BucketSettings, emit: Emit, clock: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._emit = emit
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.members = BucketMembers(settings, emit, clock)
        self.rounds = Rounds(settings, self.members, emit, clock)
        self.states = States(settings.state_rounds, settings.label)
        self.most_state_bytes: int | None = None
        """A state, or a mean, that takes more bytes is not of this run."""

    # The start and the end

    async def start(self) -> None:
        """Take a worker number, and learn what there is of the run."""
        store = self._patient()
        await check_store(self._patient(min(_CHECK_SECONDS, self._settings.timeout_seconds)))
        await self.members.take_number(store)
        await self.states.learn(store)
        status = self.members.status
        status.has_state = status.number == 0 and self.states.newest is None  # it founds the run
        await self.members.beat(store)
        self._start_task(self._beat_regularly())
        self._start_task(self._watch())

    async def leave(self) -> None:
        """Tell the others that this worker ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.members.beat(self._store, left=True)

    # Rounds

    async def take_part(self, posted: PostedRound) -> BucketRoundEnd:
        store = self._patient(posted.deadline_seconds + self._settings.timeout_seconds)
        ended = await self.rounds.take_part(store, posted)
        if ended.plan is not None:
            self._start_task(self.rounds.remove_data(self._patient(), ended.plan))
        return ended

    # The state

    async def fetch_state(self, after: int | None, seconds: float) -> GlobalState | None:
        """The run's state after all rounds that have ended; None if this worker's own, before round `after`, is that.

        With `after` it is the means since then, if all of them are still there.
        """
        store = self._patient(seconds)
        try:
            state = await self._fetch_state(store, after, self._clock() + seconds)
        except StoreUnavailable as problem:
            raise RoundFailed(f"the run's state cannot be read: {problem}") from problem
        except Malformed as problem:
            raise RoundFailed(f"the run's rounds cannot be read: {problem}") from problem
        status = self.members.status
        status.has_state = True
        next_round = after if state is None else state.numbers["sequence"]
        if next_round is not None:
            self.members.first_round = next_round
            status.next_round = max(status.next_round, next_round)
            self.rounds.next_round = status.next_round
        self._start_task(self.members.beat(self._patient()))
        return state

    async def _fetch_state(self, store: Store, after: int | None, deadline: float) -> GlobalState | None:
        if after is None and self.members.status.has_state:
            return None  # this worker founds the run
        await self.rounds.close_given_up(store)
        states = await self.states.learn(store)
        if after is not None and (not states or after >= min(states)):
            try:
                means = await self.rounds.means_from(store, after, self.most_state_bytes)
            except Malformed as problem:  # a round was removed meanwhile, perhaps
                logger.info("%s: the state is read instead of the means since round %d", problem, after)
            else:
                return self._state_of(GlobalState({}, {"sequence": after}, ""), means) if means else None
        while True:
            newest = await self._wait_for_state(store, deadline)
            try:
                record, tensors = await self.states.read(store, newest, self.most_state_bytes)
                means = await self.rounds.means_from(store, newest, self.most_state_bytes)
            except (RoundFailed, Malformed):
                if newest == max(await self.states.learn(store), default=None) or self._clock() >= deadline:
                    raise
                continue  # it was removed meanwhile: there are later ones
            state = GlobalState(tensors, record.numbers, record.layout_digest, note=record.note)
            return self._state_of(state, means)

    async def _wait_for_state(self, store: Store, deadline: float) -> int:
        """The newest state; the run's first worker may not have written one yet."""
        since = self._clock()
        settings = self._settings
        while self.states.newest is None:
            if self._clock() >= deadline:
                raise RoundFailed("no worker of the run has written a state for joiners: is the first one running?")
            waited = self._clock() - since
            await asyncio.sleep(rules.poll_seconds(waited, settings.least_poll_seconds, settings.most_poll_seconds))
            await self.states.learn(store)
        return self.states.newest

    def _state_of(self, state: GlobalState, means: "list[tuple[RoundPlan, Tensor | None]]") -> GlobalState:
        """A state, and the rounds after it."""
        position = max((member.beat.status.position for member in self.members.others.values()), default=0)
        return GlobalState(
            state.tensors,
            {**state.numbers, "sequence": state.numbers["sequence"] + len(means)},
            state.layout_digest,
            means=tuple((plan.key, mean) for plan, mean in means if mean is not None),
            plain=frozenset(plan.key.sequence for plan, mean in means if mean is not None and plan.decision.plain),
            position=position or None,
            note=state.note,
        )

    def serve_state(self, snapshot: Callable[[], GlobalState]) -> None:
        """Take the trainer's state for joiners from here on."""
        self.states.snapshot = snapshot
        self.write_state_if_due()

    def write_state_if_due(self) -> None:
        self._start_task(self._write_state_if_due())

    async def _write_state_if_due(self) -> None:
        status = self.members.status
        if status.has_state:
            await self.states.write_if_due(self._patient(), status.ended_round + 1)

    # Files

    async def put_files(self, files: Mapping[str, Path]) -> None:
        await put_files(self._patient(), files)

    async def fetch_file(self, name: str, path: Path) -> None:
        await fetch_file(self._patient(), name, path)

    # Beside the rounds

    async def _beat_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_seconds)
            try:
                await self.members.beat(self._patient(self._settings.beat_seconds))
                await self._write_state_if_due()  # there was none to give before, perhaps
            except StoreUnavailable as problem:
                logger.warning("the others do not hear of this worker now: %s", problem)

    async def _watch(self) -> None:
        settings = self._settings
        since = self._clock()
        watched = self.rounds.next_round
        while True:
            if self.rounds.next_round != watched:
                watched = self.rounds.next_round
                since = self._clock()
            waited = self._clock() - since
            await asyncio.sleep(rules.poll_seconds(waited, settings.least_poll_seconds, settings.most_poll_seconds))
            try:
                await self.rounds.look_ahead(self._store)
            except StoreUnavailable as problem:
                logger.info("round %d cannot be watched now: %s", watched, problem)

    def _patient(self, seconds: float | None = None) -> PatientStore:
        return PatientStore(self._store, self._clock() + (seconds or self._settings.timeout_seconds))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StoreUnavailable as problem:
            logger.warning("the bucket cannot be reached: %s", problem)
        except EngineError as problem:
            logger.error("%s", problem)
            self._emit("internal_error", {"what": "a task beside the rounds", "reason": str(problem)[:200]})
