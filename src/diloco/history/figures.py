"""The figures of a run at a moment, for terminal, status, page and metrics: each is counted here and nowhere else.

figures = RunFigures(history)             now
figures = RunFigures(history, until)      as they were at that time
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diloco.history.columns import finite
from diloco.history.events import ROUND_STATISTICS
from diloco.history.members import GONE, MemberHistory
from diloco.history.rounds import RoundHistory, last_contributions, mean_contributions
from diloco.history.run_history import RunHistory
from diloco.history.workers import DOING, WorkerHistory

_LOST = ("lost", "banned", "excluded", "failed")
_LATEST_ROUNDS = 100
_STRAGGLER_SHARE = 5
"""A straggler was the last in one of so many of the latest rounds, or more often."""


def data_parallel_bytes(parameters: int, steps: int, workers: int) -> int:
    """Return the bytes that a worker sends if fp32 gradients are averaged at every step.

    Each average is a reduce-scatter and an all-gather.
    """
    return round(steps * 2 * (workers - 1) / workers * 4 * parameters)


@dataclass
class WorkerFigures:
    """A worker at a moment; its counters are None before its first row."""

    number: int
    history: WorkerHistory
    state: str
    values: dict[str, float | None]
    """The last row of its columns."""

    @property
    def local(self) -> bool:
        """A worker of this machine."""
        return self.history.local

    @property
    def active(self) -> bool:
        """It has not ended, and is not gone."""
        return self.state not in ("done", "failed", "", *GONE)

    @property
    def step(self) -> int:
        """Its position in the schedule."""
        return int(self.values["step"] or 0)

    @property
    def tokens(self) -> int:
        """The tokens that it has trained on, in all its starts."""
        return int(self.values["tokens"] or 0)

    @property
    def bytes_sent(self) -> int:
        """The bytes that it has sent, with those of the rounds since its last logged step."""
        return int(self.values["bytes_sent"] or 0)

    @property
    def elapsed_seconds(self) -> float:
        """Its seconds of training, with rounds and without evaluations."""
        return self.values["elapsed_seconds"] or 0.0

    @property
    def utilization(self) -> float | None:
        """The share of these seconds that was not spent on rounds."""
        return 1 - (self.values["sync_seconds"] or 0.0) / self.elapsed_seconds if self.elapsed_seconds else None


@dataclass
class MemberFigures:
    """A member of a swarm at a moment."""

    number: int
    peer: str
    label: str
    link: str
    state: str
    since: float
    joined: float
    reason: str
    values: dict[str, float | None]
    """The last row of its columns, without the time."""

    @property
    def gone(self) -> bool:
        """It has left, is lost, or was excluded."""
        return self.state in GONE


@dataclass(frozen=True)
class ValidationFigures:
    """The validations so far."""

    step: int
    loss: float | None
    perplexity: float | None
    best_step: int | None
    best_perplexity: float | None


@dataclass(frozen=True)
class Straggler:
    """The worker for which the others waited most often in the latest rounds."""

    worker: int
    rounds: int
    """The rounds in which they waited for it."""
    of: int
    """The number of the latest rounds."""


class RunFigures:
    """The figures of a run; `until`: a moment of it, None: now."""

    def __init__(self, history: RunHistory, until: float | None = None, *, elastic: bool | None = None) -> None:
        self.history = history
        self.until = until
        self.elastic = history.elastic if elastic is None else elastic
        """The run is a swarm's, in which the positions of workers jump."""

    @cached_property
    def rounds(self) -> list[RoundHistory]:
        """The rounds with an outcome, in order."""
        return self.history.rounds.until(self.until)

    # Workers and members

    @property
    def workers(self) -> list[WorkerFigures]:
        """The workers that are known by then."""
        return self._workers_and_members[0]

    @property
    def members(self) -> list[MemberFigures]:
        """The members of a swarm that are known by then."""
        return self._workers_and_members[1]

    @cached_property
    def _workers_and_members(self) -> tuple[list[WorkerFigures], list[MemberFigures]]:
        """Workers and members. A worker that is a member too has one state: if it is a worker of this machine the one
        that its own log tells, else the one that the swarm tells."""
        workers = self._all_workers()
        return workers, self._all_members({worker.number: worker for worker in workers})

    def _all_workers(self) -> list[WorkerFigures]:
        workers = []
        for number, worker in sorted(self.history.workers.items()):
            values = {name: worker.columns.last(name, self.until) for name in worker.columns.names}
            state = worker.state_at(self.until)
            if self.until is None or values["time"] is not None or state is not None:
                state = state or ("training" if values["time"] is not None else "")
                workers.append(WorkerFigures(number, worker, state, values))
        return workers

    def _all_members(self, workers: Mapping[int, WorkerFigures]) -> list[MemberFigures]:
        rounds = self.history.rounds
        last_rounds = rounds.last_contributions if self.until is None else last_contributions(self.rounds)
        members = []
        for number, history in sorted(self.history.members.by_number.items()):
            member = _member_figures(number, history, self.until)
            if member is None:
                continue
            if number in last_rounds:  # members are listed every ten seconds only
                member.values["contributed"] = max(last_rounds[number], int(member.values["contributed"] or 0))
            worker = workers.get(number)
            if worker is not None and not member.gone:
                member.values["step"] = max(worker.step, member.values["step"] or 0)
            if worker is not None and worker.local:
                if worker.history.states:
                    member.joined = min(member.joined, worker.history.states[0][0])
                if not worker.active and not member.gone:
                    member.state = worker.state
            elif worker is not None:
                worker.state = member.state
            members.append(member)
        return members

    @cached_property
    def local(self) -> list[WorkerFigures]:
        """The workers of this machine; all, if none is known to be."""
        return [worker for worker in self.workers if worker.local] or self.workers

    @cached_property
    def running(self) -> list[WorkerFigures]:
        """The workers that train; of an ended run those that ended well."""
        active = [worker for worker in self.workers if worker.active]
        return active or [worker for worker in self.workers if worker.state not in _LOST]

    @property
    def doing(self) -> str | None:
        """The words for what the workers do before the first step of this start is logged; None from then on."""
        if self.until is None:
            logged = any(worker.history.has_logged for worker in self.local)
        else:
            logged = any(worker.step for worker in self.local)
        if logged or not self.history.events:
            return None
        states = [worker.state for worker in self.local if worker.active]
        return DOING.get(states[0], states[0]) if states else DOING["starting"]

    # Steps

    @property
    def step(self) -> int:
        """The step of the slowest worker; in a swarm, and of a run that has ended, of the furthest local one."""
        ended = not any(worker.active for worker in self.local)
        return (max if self.elastic or ended else min)((worker.step for worker in self.local), default=0)

    @property
    def loss(self) -> float | None:
        """The mean training loss of the workers of this machine."""
        return _mean([worker.values["loss"] for worker in self.local])

    @property
    def tokens(self) -> int:
        """The tokens that all known workers have trained on, as far as this machine has heard."""
        return sum(worker.tokens for worker in self.workers)

    @property
    def run_tokens(self) -> int | None:
        """The tokens of all workers in a swarm's means, the same on every machine; None where they are not counted.

        `tokens` has also what was trained on since the last round, and what was lost with a worker.
        """
        counted = self.history.run_tokens.last("tokens", self.until)
        return None if counted is None else int(counted)

    @property
    def tokens_per_second(self) -> float:
        """The present speed of all workers."""
        return sum(worker.values["tokens_per_second"] or 0.0 for worker in self.running)

    @property
    def utilization(self) -> float | None:
        """The share of the time that was not spent on rounds, since the start."""
        return _mean([worker.utilization for worker in self.local])

    def seconds_left(self, steps: float | None) -> float | None:
        """Return the seconds until the run's last step: the slowest worker's; in a swarm the fastest one's."""
        if steps is None:
            return None
        left = [
            max(0.0, steps - worker.step) * seconds
            for worker in self.local
            if (seconds := worker.values["position_seconds"])
        ]
        return (min if self.elastic else max)(left, default=None)

    # Validation

    @cached_property
    def validation(self) -> ValidationFigures | None:
        """The last validation, and the best one; None before the first."""
        values = self.history.validations.until(self.until)
        if not len(values["step"]):
            return None
        losses = values["loss"]
        best = None if np.isnan(losses).all() else int(np.nanargmin(losses))
        return ValidationFigures(
            step=int(values["step"][-1]),
            loss=finite(losses[-1]),
            perplexity=finite(values["perplexity"][-1]),
            best_step=None if best is None else int(values["step"][best]),
            best_perplexity=None if best is None else finite(values["perplexity"][best]),
        )

    @property
    def perplexities(self) -> list[tuple[int, float]]:
        """Every validation that gave a number, with its step."""
        values = self.history.validations.until(self.until)
        rows = zip(values["step"], values["perplexity"], strict=True)
        return [(int(step), float(perplexity)) for step, perplexity in rows if not np.isnan(perplexity)]

    # Rounds

    @property
    def merged_rounds(self) -> int:
        """Merged rounds, also those before a worker of this machine joined, which its own count includes."""
        own = [int(worker.history.columns.last("rounds", self.until) or 0) for worker in self.workers if worker.local]
        merged = len(self.history.rounds.merged) if self.until is None else sum(round_.merged for round_ in self.rounds)
        return max([merged, *own])

    @property
    def failed_rounds(self) -> int:
        """Rounds that gave a worker of this machine no mean; a round may have given one to another worker."""
        if self.until is not None:
            return sum(round_.failure is not None for round_ in self.rounds)
        ends = [worker.history.ended for worker in self.workers if worker.local]
        return max([len(self.history.rounds.failed), *(ended.rounds_failed for ended in ends if ended is not None)])

    @property
    def refused(self) -> int:
        """Contributions that are in no mean."""
        if self.until is None:
            return self.history.rounds.refused
        return sum(len(round_.refused) for round_ in self.rounds)

    @property
    def last_round(self) -> RoundHistory | None:
        """The last merged round."""
        if self.until is None:
            return self.history.rounds.last_merged()
        return next((round_ for round_ in reversed(self.rounds) if round_.merged), None)

    @property
    def mean_statistics(self) -> dict[str, float]:
        """The mean over the merged rounds of each of ROUND_STATISTICS; without those that no round has."""
        merged = [round_ for round_ in self.rounds if round_.merged]
        means = {name: _mean([round_.statistics[name] for round_ in merged]) for name in ROUND_STATISTICS}
        return {name: mean for name, mean in means.items() if mean is not None}

    @property
    def straggler(self) -> Straggler | None:
        """The worker for which the others waited in a fifth of the latest rounds or more."""
        latest = self.rounds[-_LATEST_ROUNDS:]
        stragglers = [round_.straggler for round_ in latest if round_.straggler is not None]
        if not stragglers:
            return None
        worker = statistics.mode(stragglers)
        times = stragglers.count(worker)
        return Straggler(worker, times, len(latest)) if times * _STRAGGLER_SHARE >= len(latest) else None

    # Bytes

    @property
    def bytes_sent(self) -> int:
        """The bytes of the worker of this machine that sent most."""
        return max((worker.bytes_sent for worker in self.local), default=0)

    @cached_property
    def usual_workers(self) -> int:
        """The workers that a data-parallel run would have had: all, or in a swarm as many as a round had on average."""
        workers = mean_contributions(self.rounds)
        if not self.elastic:
            workers = self.expected_workers or workers
        return max(1, round(workers))

    @property
    def expected_workers(self) -> int:
        """The workers that the run was started with; 0 if that is not known."""
        starts = [worker.started for worker in self.history.workers.values()]
        return max((started.workers for started in starts if started is not None), default=0)

    @cached_property
    def data_parallel_bytes(self) -> int:
        """The bytes that the busiest worker here would have sent, averaging fp32 gradients at every step: for its work
        until its last round, as `bytes_sent` is, and once it has ended for all of its work."""
        return self._data_parallel_bytes(max(map(self._tokens_of_bytes, self.local), default=0))

    @property
    def data_parallel_bytes_per_second(self) -> float | None:
        """The bytes that the busiest worker here would have sent in a second of its training."""
        seconds = max((worker.elapsed_seconds for worker in self.local), default=0.0)
        tokens = max((worker.tokens for worker in self.local), default=0)
        return self._data_parallel_bytes(tokens) / seconds if seconds else None

    def _data_parallel_bytes(self, tokens: int) -> int:
        tokens_per_step = self.history.tokens_per_step
        steps = tokens // tokens_per_step if tokens_per_step else 0
        return data_parallel_bytes(self.history.trainable_parameters, steps, self.usual_workers)

    def _tokens_of_bytes(self, worker: WorkerFigures) -> int:
        """Return the tokens behind the bytes that a worker has sent: with 500 steps in a round, bytes of one round
        compared with all steps before the next would look like half of them."""
        if not worker.active:
            return worker.tokens
        values = worker.history.columns.until(self.until)
        sent = np.flatnonzero(np.diff(values["bytes_sent"], prepend=0.0))
        return int(values["tokens"][sent[-1]]) if len(sent) else 0

    @property
    def link_bytes_per_second(self) -> float | None:
        """The most that the link carried in a round."""
        rates = [
            round_.bytes_sent / seconds
            for round_ in self.rounds
            if (seconds := round_.statistics["seconds"]) and round_.bytes_sent
        ]
        return max(rates, default=None)

    # Health

    @cached_property
    def states(self) -> dict[int, str]:
        """The state of every worker and member by number."""
        states = {worker.number: worker.state for worker in self.workers}
        for member in self.members:
            known = member.number in states and self.history.workers[member.number].local
            if not known or member.gone:
                states[member.number] = member.state
        return states

    @property
    def present(self) -> int:
        """The number of workers that are there."""
        return sum(state not in (*GONE, "failed") for state in self.states.values())

    @property
    def lost(self) -> list[int]:
        """The workers that are gone against their will."""
        return sorted(number for number, state in self.states.items() if state in _LOST)

    @property
    def left(self) -> list[int]:
        """The workers that have left."""
        return sorted(number for number, state in self.states.items() if state == "left")

    @property
    def not_finite(self) -> list[int]:
        """The workers whose loss is no number."""
        return sorted(number for number, worker in self.history.workers.items() if worker.diverged_at(self.until))


def _member_figures(number: int, member: MemberHistory, time: float | None) -> MemberFigures | None:
    """Return a member's figures at a time (None: now); None if it was not known yet."""
    states = [state for state in member.states if time is None or state[0] <= time]
    if not states:
        return None
    since, state, reason = states[-1]
    values = {name: member.columns.last(name, time) for name in member.columns.names if name != "time"}
    joined = next((changed for changed, new_state, _ in states if new_state not in GONE), since)
    return MemberFigures(number, member.peer, member.label, member.link, state, since, joined, reason, values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
