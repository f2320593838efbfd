"""A run, folded from its events: what terminal, report, status, compare, page, metrics, plots and sinks read of it.

    history = read_history(folder)              of a whole log
    history = LiveHistory(folder); .refresh()   while the run writes it: the same in the end

It keeps numbers and short texts instead of events, so that a run of a hundred thousand events stays small. Everything
carries its time: the figures of any moment of the run are computed from the same history (figures.py). Steps that a
resume has taken back are left out: a worker that resumes from step 120 takes its later steps again, so the log's
earlier events of these steps no longer count. The log itself is only ever appended to. No reader of a run counts events
itself.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diloco.history.columns import Columns
from diloco.history.events import (
    AloneEvent,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    ExcludedEvent,
    FirstStepEvent,
    JoinedEvent,
    LossNotFiniteEvent,
    MemberEvent,
    MembersEvent,
    ResumedEvent,
    ResyncEvent,
    RoundEndedEvent,
    RoundMember,
    RoundPostedEvent,
    SampleEvent,
    SizesEvent,
    StartingEvent,
    StateArrivingEvent,
    StepEvent,
    SwarmEvent,
    UnknownEvent,
    ValidationEvent,
    WaitingEvent,
    WarmStartEvent,
    WorkerEndedEvent,
    WorkerFailedEvent,
    WorkerFinishedEvent,
    WorkerStartedEvent,
)
from diloco.history.log import Decode, EventReader, decode_line, read_events
from diloco.history.members import MembersHistory
from diloco.history.notes import RunNotes
from diloco.history.rounds import RoundsHistory
from diloco.history.waterfall import PhaseSpan, round_spans
from diloco.history.workers import OwnWork, WorkerHistory

logger = logging.getLogger(__name__)
_MOST_SAMPLES = 200
_MOST_MEMBER_LISTS = 64  # a resume goes back by some rounds
_ERRORS_OF_ODD_EVENTS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""The exceptions that an event of another version raises, or one that is made up."""
_BEGINNINGS = (SizesEvent, SwarmEvent, WorkerStartedEvent)
"""The events that a worker writes first: in a swarm `swarm`; elsewhere `sizes`, which one worker writes, or
`worker_started`."""


class RunClock:
    """The time that a run has taken: from its first event to its last, without the pauses in which nothing ran."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.starts = 0
        """How often the run was started."""
        self.pauses: list[tuple[float, float]] = []
        """When the run was started again, and for how many seconds nothing had run."""
        self._begun: set[tuple[int, str]] = set()

    def update(self, event: Event) -> bool:
        """Take in an event. Returns whether the run was started again: the event is one of _BEGINNINGS, and its worker
        has written one of that type in this start."""
        again = False
        time = event.time
        if isinstance(event, _BEGINNINGS):
            beginning = (event.worker, event.type)
            again = beginning in self._begun
            if again and self.last is not None:
                self.pauses.append((time, max(0.0, time - self.last)))
                self._begun.clear()
            self._begun.add(beginning)
        self.starts += again or self.first is None
        self.first = time if self.first is None else min(self.first, time)
        self.last = time if self.last is None else max(self.last, time)
        return again

    def seconds(self, until: float | None = None) -> float | None:
        """Return how long the run had trained by then; None before its first event."""
        end = self.last if until is None else until
        if end is None or self.first is None:
            return None
        return max(0.0, end - self.first - sum(taken for at, taken in self.pauses if at <= end))


@dataclass
class RunStart:
    """What one start of the run has come to: a loss that is no number, an exclusion, a sample."""

    bad_loss: LossNotFiniteEvent | None = None
    excluded: bool = False
    """The swarm has refused a worker of this machine."""
    sample: SampleEvent | None = None

    @property
    def would_end_the_same(self) -> bool:
        """True if resuming is of no use: a loss was not finite, or the swarm refused the worker."""
        return self.bad_loss is not None or self.excluded


class _MemberList(NamedTuple):
    """The members that an event of a round or of a worker's end lists."""

    step: int
    members: Sequence[RoundMember]
    roster: Sequence[int]


class _MissedSteps(NamedTuple):
    """The steps of the schedule that a worker did not take, since it was new at `joined_at`."""

    worker: int
    joined_at: int
    steps: int


class RunHistory:
    """What the events of a run say together; `update` takes them in, in the order of the log."""

    def __init__(self, *, elastic: bool = False) -> None:
        """`elastic`: the run is a swarm's, in which positions jump; this is also learnt from the events."""
        self.elastic = elastic
        self.events = 0
        self.refused_events = 0
        """How many events have fields that are not those of this version."""
        self.clock = RunClock()
        self.latest_start = RunStart()
        self.started: WorkerStartedEvent | None = None
        """The latest start of a worker."""
        self.resolved: Mapping[str, Any] = {}
        """Every option and what was decided for those left open, by dotted key."""
        self.sizes: SizesEvent | None = None
        self.swarm: SwarmEvent | None = None
        self.workers: dict[int, WorkerHistory] = {}
        self.left_out: dict[int, WorkerHistory] = {}
        """The workers that a resumed run of fewer workers no longer has, as far as their steps count."""
        self.validations = Columns("step", "loss", "perplexity", "measured")
        """`time`: when the loss of all shares was known; `measured`: when a worker measured its share."""
        self.rounds = RoundsHistory()
        self.members = MembersHistory()
        self.run_tokens = Columns("tokens")
        """The tokens of all workers in a swarm's means, as the workers of this machine count them."""
        self.notes = RunNotes()
        self.samples: list[SampleEvent] = []
        self.checkpoint_step = 0
        self._member_lists: deque[_MemberList] = deque(maxlen=_MOST_MEMBER_LISTS)
        self._measured_at: dict[int, float] = {}  # step of a validation -> when a first worker measured its share
        self._run_tokens: dict[int, int] = {}  # as each worker of this machine has last told them
        self._local: set[int] = set()
        self._missed_steps: list[_MissedSteps] = []

    # What the readers ask

    @property
    def agreed(self) -> Sequence[RoundMember]:
        """The members with what they agreed on, of the last round or worker's end that lists any."""
        return next((last.members for last in reversed(self._member_lists) if last.members), ())

    @property
    def roster(self) -> Sequence[int]:
        """The numbers of all members at the last round of a swarm."""
        return next((last.roster for last in reversed(self._member_lists) if last.roster), ())

    @property
    def parameters(self) -> int:
        """The parameters of the model."""
        return 0 if self.started is None else self.started.parameters

    @property
    def trainable_parameters(self) -> int:
        """The parameters that are averaged: with LoRA those of the adapters. Earlier versions do not tell them."""
        return 0 if self.started is None else self.started.trainable_parameters or self.started.parameters

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one inner step of a worker."""
        return 0 if self.started is None else self.started.tokens_per_step

    @property
    def unigram_perplexity(self) -> float | None:
        """The perplexity of guessing words by their frequency."""
        return None if self.started is None else self.started.unigram_perplexity

    @property
    def local_workers(self) -> dict[int, WorkerHistory]:
        """The workers of this machine by number."""
        return {number: worker for number, worker in sorted(self.workers.items()) if worker.local}

    @property
    def own_work(self) -> dict[int, OwnWork]:
        """The work of each worker of this machine in all its starts."""
        return {number: worker.all_work() for number, worker in self.workers.items() if worker.own_work is not None}

    def spans(self) -> list[PhaseSpan]:
        """Return the phases of each worker's rounds as spans of time."""
        began = {number: worker.began for number, worker in self.workers.items()}
        return round_spans([round_ for _, round_ in sorted(self.rounds.by_sequence.items())], began)

    def steps_not_taken(self) -> int:
        """Return the steps that are counted for workers which joined later, and which these did not take."""
        return sum(missed.steps for missed in self._missed_steps)

    # Taking in the events

    def update(self, event: Event) -> None:
        """Take in the next event of the log."""
        self.events += 1
        if self.clock.update(event):
            self.latest_start = RunStart()
        if isinstance(event, UnknownEvent):
            if event.problem is not None:
                self.refused_events += 1
                logger.debug("an event of type %s was left out: %s", event.name, event.problem)
            return
        try:
            if (take_in := _HANDLERS.get(type(event))) is not None:
                take_in(self, event)
            if isinstance(event, MemberEvent):
                self.members.changed(event)
            self.notes.update(event, self._local)
        except _ERRORS_OF_ODD_EVENTS:
            self.refused_events += 1
            logger.debug("an event was left out: %.200r", event, exc_info=True)

    def _writer(self, event: Event) -> WorkerHistory:
        """Return the worker of this machine that wrote the event."""
        worker = self._worker(event.worker)
        worker.local = True
        self._local.add(event.worker)
        return worker

    def _worker(self, number: int) -> WorkerHistory:
        """Return the worker with this number; a new one if it is not known yet."""
        worker = self.workers.get(number)
        if worker is None:
            worker = self.left_out.pop(number) if number in self.left_out else WorkerHistory()
            self.workers[number] = worker
        return worker

    def _on_sizes(self, event: SizesEvent) -> None:
        self.sizes = event

    def _on_worker_started(self, event: WorkerStartedEvent) -> None:
        worker = self._writer(event)
        worker.ended = None
        worker.starts += 1
        worker.progress.update(event)
        worker.started = event
        worker.first_step_seconds = None
        worker.has_logged = False
        worker.states.append((event.time, "starting"))
        self.started = event
        self.resolved = event.resolved
        self.elastic |= event.resolved.get("engine") in ("swarm", "bucket")
        self._began(worker, event)

    def _on_starting(self, event: StartingEvent) -> None:
        worker = self._writer(event)
        worker.states.append((event.time, event.doing))
        self._began(worker, event)

    def _began(self, worker: WorkerHistory, event: Event) -> None:
        worker.began.append(event.time)
        self.rounds.began(event.worker, event.time)

    def _on_first_step(self, event: FirstStepEvent) -> None:
        worker = self._writer(event)
        worker.first_step_seconds = event.seconds
        worker.progress.update(event)
        worker.states.append((event.time, "training"))

    def _on_step(self, event: StepEvent) -> None:
        worker = self._writer(event)
        worker.has_logged = True
        worker.progress.update(event)
        worker.reached = max(worker.reached, event.step)
        worker.count(event.time, logged=True, event=event)
        diverged = worker.progress.loss is None
        if diverged != (bool(worker.not_finite) and worker.not_finite[-1][1]):
            worker.not_finite.append((event.time, diverged))
        worker.set_state(event.time, "training")
        self._count_own_work(worker, event)

    def _count_own_work(self, worker: WorkerHistory, event: StepEvent | WorkerEndedEvent) -> None:
        worker.own_work = worker.own_work or OwnWork()
        worker.own_work.read(event)

    def _on_round_posted(self, event: RoundPostedEvent) -> None:
        self.rounds.posted(event)
        worker = self._writer(event)
        worker.progress.update(event)
        worker.count(event.time)
        worker.set_state(event.time, "in a round")

    def _on_round(self, event: RoundEndedEvent) -> None:
        tells_members = self.rounds.ended(event)
        worker = self._writer(event)
        worker.progress.update(event)
        worker.reached = max(worker.reached, event.step)
        if tells_members:
            self._take_in_reports(event)
        self._member_lists.append(_MemberList(event.step, event.members, event.roster))
        worker.count(event.time)
        worker.set_state(event.time, "training")

    def _take_in_reports(self, event: RoundEndedEvent) -> None:
        """Take in the reports that the members sent with a round."""
        for member in event.members:
            worker = self._worker(member.worker)
            before = worker.progress.step
            if worker.progress.report(member.report, elsewhere=not worker.local, time=event.time):
                worker.starts += 1
            worker.heard_of = True
            worker.most_tokens_told = max(worker.most_tokens_told, member.report.tokens or 0)
            if not worker.local and worker.progress.step > before:
                worker.count(event.time, logged=True)
            if self.elastic:
                self.members.listed.add(member.worker)

    def _on_evaluation(self, event: EvaluationEvent) -> None:
        """Note when a worker has first measured its share of a validation, which is known with the next round only: on
        a curve over time the validation belongs where it was measured."""
        self._measured_at.setdefault(event.step, event.time)

    def _on_validation(self, event: ValidationEvent) -> None:
        if (self.validations.last("step") or -1.0) >= event.step:
            self.validations.drop("step", event.step - 1)
        row = {"time": event.time, "step": event.step, "loss": event.loss, "perplexity": event.perplexity}
        self.validations.append(row | {"measured": self._measured_at.get(event.step, event.time)})

    def _on_sample(self, event: SampleEvent) -> None:
        self.latest_start.sample = event
        self.samples.append(event)
        del self.samples[:-_MOST_SAMPLES]

    def _on_checkpoint(self, event: CheckpointEvent) -> None:
        self.checkpoint_step = event.step

    def _on_loss_not_finite(self, event: LossNotFiniteEvent) -> None:
        self.latest_start.bad_loss = event

    def _on_excluded(self, event: ExcludedEvent) -> None:
        del event
        self.latest_start.excluded = True

    def _on_worker_ended(self, event: WorkerEndedEvent) -> None:
        worker = self._writer(event)
        worker.ended = event
        worker.states.append((event.time, "done" if isinstance(event, WorkerFinishedEvent) else "failed"))
        worker.reached = max(worker.reached, event.inner_steps)
        self.members.agreed(event)
        self._member_lists.append(_MemberList(event.inner_steps, event.members, ()))
        worker.progress.update(event)
        worker.count(event.time)
        self._count_own_work(worker, event)
        if event.tokens_by_worker:
            self._run_tokens.clear()
            self._count_run_tokens(event, sum(event.tokens_by_worker.values()))

    def _on_resumed(self, event: ResumedEvent) -> None:
        """Forget what the resume has taken back: of this worker and of workers that are no longer in the run; of all
        workers if a swarm was started again (`workers` is 0)."""
        taken_back = {number for number in self.workers if number == event.worker or number >= event.workers}
        reached = self.workers[event.worker].reached if event.worker in self.workers else 0
        self._missed_steps = [
            missed
            for missed in self._missed_steps
            if missed.joined_at <= event.step or (missed.worker != event.worker and missed.worker < event.workers)
        ]
        for number in taken_back:
            self.workers[number].go_back(event.time, event.step)
            self._run_tokens.pop(number, None)
        if event.workers:
            self.left_out |= {number: worker for number, worker in self.workers.items() if number >= event.workers}
            self.workers = {number: worker for number, worker in self.workers.items() if number < event.workers}
        if event.worker == min(self.workers, default=0) or not event.workers:
            self.validations.drop("step", event.step)
            self._measured_at = {step: time for step, time in self._measured_at.items() if step <= event.step}
            self.rounds.forget(event.step, event.rounds if event.workers else None)
            kept = [members for members in self._member_lists if members.step <= event.step]
            self._member_lists = deque(kept, _MOST_MEMBER_LISTS)
        if event.new:
            missed_steps = event.step - min(reached, event.step)
            self._missed_steps.append(_MissedSteps(event.worker, event.step, missed_steps))
        if event.worker in self.workers:
            worker = self._writer(event)
            worker.progress.update(event)
            worker.reached = event.step
            worker.count(event.time)
            worker.began.append(event.time)
        self.rounds.began(event.worker, event.time)

    # Events of a swarm

    def _on_swarm(self, event: SwarmEvent) -> None:
        self.swarm = event
        self._writer(event).states.append((event.time, "starting" if event.founded else "joining"))

    def _on_state_arriving(self, event: StateArrivingEvent) -> None:
        share = event.received_bytes / max(1, event.all_bytes)
        self._writer(event).states.append((event.time, f"joining: {share:.0%}"))

    def _on_waiting(self, event: AloneEvent | WaitingEvent | WarmStartEvent) -> None:
        worker = self._writer(event)
        if worker.ended is None:  # its network process may tell of the swarm a little longer
            worker.set_state(event.time, event.type)

    def _on_joined(self, event: JoinedEvent) -> None:
        worker = self._writer(event)
        worker.ended = None
        worker.starts += 1
        worker.earlier_work = worker.all_work()
        worker.own_work = OwnWork()
        worker.progress.update(event)
        worker.count(event.time)
        worker.states.append((event.time, "joined"))
        worker.began.append(event.time)

    def _on_resync(self, event: ResyncEvent) -> None:
        worker = self._writer(event)
        worker.progress.update(event)
        worker.count(event.time)

    def _on_members(self, event: MembersEvent) -> None:
        self.members.list_all(event)
        if event.run_tokens is not None:
            self._count_run_tokens(event, event.run_tokens)

    def _count_run_tokens(self, event: Event, tokens: int) -> None:
        """Take in a worker's count. The largest one is the run's: a worker that missed a round has counted less."""
        self._run_tokens[event.worker] = tokens
        self.run_tokens.append({"time": event.time, "tokens": max(self._run_tokens.values())})


_HANDLERS: dict[type[Event], Callable[[RunHistory, Any], None]] = {
    SizesEvent: RunHistory._on_sizes,
    WorkerStartedEvent: RunHistory._on_worker_started,
    StartingEvent: RunHistory._on_starting,
    FirstStepEvent: RunHistory._on_first_step,
    StepEvent: RunHistory._on_step,
    RoundPostedEvent: RunHistory._on_round_posted,
    RoundEndedEvent: RunHistory._on_round,
    EvaluationEvent: RunHistory._on_evaluation,
    ValidationEvent: RunHistory._on_validation,
    SampleEvent: RunHistory._on_sample,
    CheckpointEvent: RunHistory._on_checkpoint,
    LossNotFiniteEvent: RunHistory._on_loss_not_finite,
    ExcludedEvent: RunHistory._on_excluded,
    WorkerFinishedEvent: RunHistory._on_worker_ended,
    WorkerFailedEvent: RunHistory._on_worker_ended,
    ResumedEvent: RunHistory._on_resumed,
    SwarmEvent: RunHistory._on_swarm,
    StateArrivingEvent: RunHistory._on_state_arriving,
    AloneEvent: RunHistory._on_waiting,
    WaitingEvent: RunHistory._on_waiting,
    WarmStartEvent: RunHistory._on_waiting,
    JoinedEvent: RunHistory._on_joined,
    ResyncEvent: RunHistory._on_resync,
    MembersEvent: RunHistory._on_members,
}


class LiveHistory:
    """The history of a run folder, which `refresh` brings up to date: it is then that of the whole log so far."""

    def __init__(
        self, folder: Path, *, elastic: bool = False, decoder: Callable[[], Decode] = lambda: decode_line
    ) -> None:
        self.folder = folder
        self.reader = EventReader(folder, decoder)
        self.history = RunHistory(elastic=elastic)
        self.beginnings = 0
        """How often the log was read from its beginning: it was replaced, or a worker has got another number."""
        self._elastic = elastic

    def new_events(self) -> Iterator[Event]:
        """Yield each event that was appended since the last call, after the history has taken it in."""
        while True:
            events, restarted = self.reader.read()
            if restarted:
                self.history = RunHistory(elastic=self._elastic)
                self.beginnings += 1
            for event in events:
                self.history.update(event)
                yield event
            if not events:
                return

    def refresh(self) -> bool:
        """Read what is new; return whether anything has changed."""
        before = self.beginnings
        count = sum(1 for _ in self.new_events())
        return bool(count) or self.beginnings != before


def read_history(folder: Path) -> RunHistory:
    """Return the history of a run folder so far."""
    live = LiveHistory(folder)
    live.refresh()
    return live.history


def history_until(folder: Path, step: int) -> RunHistory:
    """Return the history of a run folder as far as it led to the checkpoint of a step.

    It ends where the last worker of this machine has written that checkpoint. Only a validation is told later: its
    shares come together with the next rounds.
    """
    events = read_events(folder)
    saved = [event.time for event in events if isinstance(event, CheckpointEvent) and event.step == step]
    end = max(saved, default=math.inf)
    history = RunHistory()
    for event in events:
        if event.time > end and isinstance(event, WorkerStartedEvent):
            break
        if getattr(event, "step", 0) <= step and (event.time <= end or isinstance(event, ValidationEvent)):
            history.update(event)
    return history
