"""A worker of several ranks of which the first alone is connected to the others: to a swarm it looks like one rank.

The first rank has the engine. Every method that asks it is collective among the worker's ranks: the first rank asks,
and tells all ranks the answer, so that none of them decides on its own. Before an answer the first rank may tell that
another worker wants the state, which is in pieces on all ranks: they gather it then. So a state is served after an
inner step and while a round is waited for; a joiner that asks in between waits until then.

While the first rank waits for its engine, in a thread, it tells the others now and then that it is still there: none of
their waits is longer than that of a collective. A rank that dies ends its worker within a moment, since its connections
close.
"""

import atexit
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, replace
from typing import Any

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.engines.base import Engine, PendingRound
from diloco.engines.rounds import Contribution, GlobalState, Member, Report, RoundKey, RoundResult, RoundSummary
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import DiLoCoError, EngineError, Excluded, RoundFailed

STATE_SECONDS = 60.0
"""The longest that a state may take until it is gathered: an inner step, or an evaluation, comes first."""
_STILL_THERE_SECONDS = 5.0
"""Between two words of a first rank that waits. Much less than the bound of a collective."""
_ANSWER = b"a"
_GATHER = b"g"
_STILL_THERE = b"s"


class FirstRankEngine(Engine):
    """The engine of one rank of such a worker; `first` is that of the first rank alone, None on the others."""

    elastic = True

    def __init__(self, first: Engine | None, ranks: WorkerRanks, on_close: Callable[[], None] | None = None) -> None:
        """Collective among the worker's ranks. `on_close` is called once, after all is closed."""
        assert (first is not None) == (ranks.rank == 0)
        assert first is None or first.elastic
        self.first = first
        self.ranks = ranks
        self.worker = 0
        self.workers = 1
        self._members: tuple[Member, ...] = ()
        self._provider: Callable[[], GlobalState] | None = None
        self._changed = threading.Condition()
        self._asked: list[Future[GlobalState]] = []
        """The requests for the state, on the first rank."""
        self._on_close = on_close
        self._together(self._place)
        atexit.register(self.close)  # the groups' threads must end before the interpreter does

    # What all ranks ask together

    def wanted(self, sequence: int) -> bool:
        """Ask whether the others wait for this round no longer. Collective."""
        return bool(self._together(lambda: {**self._place(), "wanted": self._of_first().wanted(sequence)})["wanted"])

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        if self.first is None:
            return _ToldRound(self, None, contribution)
        try:
            return _ToldRound(self, self.first.start_round(key, contribution, deadline_seconds), contribution)
        except EngineError as error:
            return _ToldRound(self, error, contribution)

    def fetch_state(self) -> GlobalState | None:
        """Fetch the others' state. Collective; its tensors are on the first rank only, and GatheredReplica spreads
        them."""
        fetched: list[GlobalState | None] = [None]

        def fetch() -> dict[str, Any]:
            fetched[0] = self._of_first().fetch_state()
            return self._place() | {"state": None if fetched[0] is None else _state_as_json(fetched[0])}

        said = self._together(fetch, in_thread=True)["state"]
        if said is None:
            return None
        means = [torch.zeros(size, dtype=torch.uint8) for _, size in said["means"]]
        if fetched[0] is not None:
            means = [data.reshape(-1) for _, data in fetched[0].means]
        for data in means:
            self.tell_bytes(data)
        state = _state_from_json(said, means)
        return state if fetched[0] is None else replace(state, tensors=fetched[0].tensors)

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        """Serve the state of the first rank's `provider`, which is called on all ranks together, in the trainer's
        thread."""
        self._provider = provider
        if self.first is not None:
            self.first.serve_state(self._ask_for_state)

    def wait_for_first(self, wait: Callable[[], object]) -> None:
        """Go on when `wait` has returned on the first rank, which calls it in a thread. Collective."""

        def waited() -> dict[str, Any]:
            wait()
            return self._place()

        self._together(waited, in_thread=True)

    # What the first rank does alone

    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float, run_tokens: int = 0) -> None:
        if self.first is not None:
            self.first.progress(
                inner_steps=inner_steps, tokens=tokens, loss=loss, step_seconds=step_seconds, run_tokens=run_tokens
            )

    @property
    def most_state_bytes(self) -> int | None:
        return None if self.first is None else self.first.most_state_bytes

    @most_state_bytes.setter
    def most_state_bytes(self, most: int | None) -> None:
        if self.first is not None:
            self.first.most_state_bytes = most

    @property
    def next_round(self) -> Callable[[], int | None] | None:
        return None if self.first is None else self.first.next_round

    @next_round.setter
    def next_round(self, next_round: Callable[[], int | None] | None) -> None:
        if self.first is not None:
            self.first.next_round = next_round

    def members(self) -> tuple[Member, ...]:
        return self._members

    def close(self) -> None:
        atexit.unregister(self.close)
        self.closed = True
        if self.first is not None:
            self.first.close()
        self.ranks.close(broken=True)  # the others may have left already
        on_close = self._on_close
        self._on_close = None
        if on_close is not None:
            on_close()

    # Telling

    def tell_bytes(self, data: torch.Tensor) -> None:
        """Put the first rank's uint8 vector into that of every rank. Collective."""
        if len(data):
            self.ranks.share(data, [0, *(len(data) for _ in range(self.ranks.count))])

    def _of_first(self) -> Engine:
        assert self.first is not None
        return self.first

    def _place(self) -> dict[str, Any]:
        first = self._of_first()
        return {"worker": first.worker, "workers": first.workers, "excluded": first.excluded}

    def _take_in(self, said: Mapping[str, Any]) -> None:
        self.worker = said["worker"]
        self.workers = said["workers"]
        self.excluded = said["excluded"]
        if "members" in said:
            self._members = tuple(map(_member_from_json, said["members"]))

    def _together(self, ask: Callable[[], dict[str, Any]], *, in_thread: bool = False) -> dict[str, Any]:
        """Return the first rank's answer on every rank; what it raises is raised on every rank.

        `in_thread`: the answer may take long, and is waited for in a thread.
        """
        if self.first is None:
            said = self._hear()
        else:
            said = self._ask(ask, in_thread=in_thread)
        if "error" in said:
            raise _error_from_json(said["error"])
        self._take_in(said)
        return said

    def _hear(self) -> dict[str, Any]:
        """Return on another rank what the first one says, after gathering the states that it wants."""
        while True:
            data = self.ranks.tell(b"")
            if data[:1] == _ANSWER:
                said: dict[str, Any] = json.loads(data[1:])
                return said
            if data[:1] == _GATHER:
                self._gather_state()

    def _ask(self, ask: Callable[[], dict[str, Any]], *, in_thread: bool) -> dict[str, Any]:
        """Ask on the first rank, and tell the others."""
        answer: Future[dict[str, Any]] = Future()

        def work() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001  raised again below
                answer.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        if in_thread:
            threading.Thread(target=work, name="diloco-first-rank", daemon=True).start()
        else:
            work()
        self._serve_until(answer)
        error = answer.exception()
        said = answer.result() if error is None else {"error": _error_as_json(error)}
        self.ranks.tell(_ANSWER + json.dumps(said).encode())
        if error is not None:
            raise error
        return said

    def _serve_until(self, answer: "Future[dict[str, Any]]") -> None:
        told = time.monotonic()
        while True:
            with self._changed:
                if not answer.done() and not self._asked:
                    self._changed.wait(_STILL_THERE_SECONDS)
                asked = bool(self._asked)
            if asked:
                self.ranks.tell(_GATHER)
                self._gather_state()
            if answer.done():
                return
            if time.monotonic() - told >= _STILL_THERE_SECONDS:
                told = time.monotonic()
                self.ranks.tell(_STILL_THERE)

    # The state

    def _ask_for_state(self) -> GlobalState:
        """Wait until the ranks have gathered the state. Called in a thread of the first rank's engine."""
        asked: Future[GlobalState] = Future()
        with self._changed:
            self._asked.append(asked)
            self._changed.notify_all()
        try:
            return asked.result(STATE_SECONDS)
        except FutureTimeoutError:
            with self._changed:
                if asked in self._asked:
                    self._asked.remove(asked)
            raise RoundFailed(f"the ranks of this worker did not gather its state within {STATE_SECONDS:g} s") from None

    def _gather_state(self) -> None:
        """Gather the state for the requests that are there. Collective."""
        assert self._provider is not None
        with self._changed:
            asked = self._asked
            self._asked = []
        try:
            state = self._provider()
        except RoundFailed as failure:  # on all ranks alike
            for future in asked:
                future.set_exception(failure)
            return
        for future in asked:
            future.set_result(state)


def connect_first(
    connect: Callable[[], Engine], ranks: WorkerRanks, on_close: Callable[[], None] | None = None
) -> FirstRankEngine:
    """Connect the first rank to the others. Collective; if it cannot, all ranks raise an error."""
    first = None
    problem: DiLoCoError | None = None
    if ranks.rank == 0:
        try:
            first = connect()
        except DiLoCoError as error:
            problem = error
    said = ranks.tell(b"" if problem is None else json.dumps(_error_as_json(problem)).encode())
    if problem is not None:
        raise problem
    if said:
        raise _error_from_json(json.loads(said))
    return FirstRankEngine(first, ranks, on_close)


class _ToldRound(PendingRound):
    """A round in flight. `wait` is collective, and gives every rank the mean and the same result."""

    def __init__(
        self, engine: FirstRankEngine, pending: PendingRound | EngineError | None, contribution: Contribution
    ) -> None:
        self._engine = engine
        self._pending = pending
        self._vector: EncodedVector = contribution.vector
        self._result: RoundResult | DiLoCoError | None = None

    def wait(self) -> RoundResult:
        if self._result is None:
            try:
                self._result = self._wait()
            except DiLoCoError as error:
                self._result = error
        if isinstance(self._result, DiLoCoError):
            raise self._result
        return self._result

    def _wait(self) -> RoundResult:
        engine = self._engine
        own: list[RoundResult] = []

        def ended() -> dict[str, Any]:
            assert self._pending is not None
            if isinstance(self._pending, EngineError):
                raise self._pending
            own.append(self._pending.wait())
            members = [_member_as_json(member) for member in own[0].members]
            return engine._place() | {"result": own[0].as_json(), "members": members}

        said = engine._together(ended, in_thread=True)
        mean = self._vector.mean
        summary = RoundSummary.from_json(said["result"])
        if summary.total_weight and mean.num_bytes:
            if own and own[0].mean is not mean:
                mean.data.copy_(own[0].mean.data)  # to where all ranks have it
            engine.tell_bytes(mean.data.view(-1))
        if own:
            return replace(own[0], mean=mean)
        return RoundResult(mean=mean, members=engine.members(), **summary.summary_fields())


# As JSON, which has all bits of a float; nan and infinite ones are in Python's


def _member_as_json(member: Member) -> dict[str, Any]:
    return member.as_json() | {"note": member.note.hex()}


def _member_from_json(said: Mapping[str, Any]) -> Member:
    report = said["report"] | {"last_round_seconds": tuple(said["report"]["last_round_seconds"])}
    return Member(**{**said, "report": Report(**report), "note": bytes.fromhex(said["note"])})


def _state_as_json(state: GlobalState) -> dict[str, Any]:
    """Return all of a state but the tensors and the bytes of the means."""
    return {
        "numbers": dict(state.numbers),
        "layout_digest": state.layout_digest,
        "means": [[asdict(key), data.numel()] for key, data in state.means],
        "plain": sorted(state.plain),
        "position": state.position,
        "note": state.note.hex(),
    }


def _state_from_json(said: Mapping[str, Any], means: list[torch.Tensor]) -> GlobalState:
    keys = [RoundKey(**key) for key, _ in said["means"]]
    return GlobalState(
        {},
        said["numbers"],
        said["layout_digest"],
        means=tuple(zip(keys, means, strict=True)),
        plain=frozenset(said["plain"]),
        position=said["position"],
        note=bytes.fromhex(said["note"]),
    )


def _error_as_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, RoundFailed):
        fields = {"stopping": error.stopping, "resync": error.resync, "withheld": error.withheld}
        return {"kind": "round", "reason": error.reason, **fields}
    kind = "excluded" if isinstance(error, Excluded) else "other"
    return {"kind": kind, "reason": str(error) or type(error).__name__}


def _error_from_json(said: Mapping[str, Any]) -> DiLoCoError:
    if said["kind"] == "round":
        fields = {name: said[name] for name in ("stopping", "resync", "withheld")}
        return RoundFailed(said["reason"], **fields)
    if said["kind"] == "excluded":
        return Excluded(said["reason"])
    return EngineError(f"the first rank of this worker cannot go on: {said['reason']}")
