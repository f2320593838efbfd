"""One worker's training: batches in, inner steps, rounds, evaluations, events out.

The same for workers started by `diloco train`, `diloco join` and torchrun. The mode says what is averaged (modes.py),
`peers` what the other workers require (peers.py; swarm/training.py for a swarm). The loop prints nothing: it writes
events.jsonl.
Inputs are a pure function of (seed, shards, how far they were read).
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from diloco.data.corpus import Corpus
from diloco.data.order import Int64, check_disjoint, worker_shards
from diloco.engines.base import Connection, Engine
from diloco.engines.rounds import RoundKey
from diloco.errors import DiLoCoError, EngineError, LossNotFinite, ModelNotWritten
from diloco.history.events import (
    CorpusEvent,
    LossNotFiniteEvent,
    MicroBatchesEvent,
    ModelFailedEvent,
    ResumedEvent,
    RoundPostedEvent,
    WorkerEndedEvent,
    WorkerFailedEvent,
    WorkerFinishedEvent,
    WorkerStartedEvent,
)
from diloco.history.log import EventLog
from diloco.models.base import LanguageModel
from diloco.models.registry import build_model
from diloco.outer.rounds import RoundEvent
from diloco.training.batches import ShardReader, WorkerTexts
from diloco.training.checkpoints.resume import Start
from diloco.training.checkpoints.store import CheckpointOwner, CheckpointStore
from diloco.training.checkpoints.worker_state import Checkpointer, HasState, WorkerState
from diloco.training.compute import PlacedModel, Precision, prepare
from diloco.training.config.run import RunConfig
from diloco.training.inner import inner_optimizer, learning_rate_schedule, set_position
from diloco.training.loss_check import BadLoss, LossCheck
from diloco.training.micro_batches import budget_bytes, fewest_micro_batches, micro_batches
from diloco.training.modes import DataParallel, DiLoCoMode, Mode
from diloco.training.peers import FixedPeers, Peers
from diloco.training.records.agreement import Agreement
from diloco.training.records.outputs import Samples, sample, write_model
from diloco.training.records.run_folder import MODEL_FOLDER
from diloco.training.records.worker_events import (
    end_fields,
    reported_round,
    resolved_values,
    round_ended,
    round_members,
    started_fields,
    write_resolved,
)
from diloco.training.sizes.memory import Placement
from diloco.training.step_log import StepLog
from diloco.training.validation import Evaluator, Validation

logger = logging.getLogger(__name__)


class Training:
    """A worker from its first parameters to its last event, in a fixed set of workers."""

    def __init__(
        self,
        config: RunConfig,
        texts: WorkerTexts | Corpus,
        engine: Connection,
        events: EventLog,
        device: torch.device,
        folder: Path,
        *,
        leader: bool,
        restoring: bool = False,
        sharing: int = 1,
    ) -> None:
        """`leader`: this is the first process of its machine, which writes the events that concern the whole run.

        `restoring`: `resume` loads a checkpoint next, on every worker, so no parameters are sent at the start.

        `sharing` is the number of processes that compute on this one's GPU.
        """
        self.leader = leader and engine.ranks.rank == 0
        self._writes_model = bool(engine.ranks.gather_numbers(self.leader)[0][0])  # all ranks of the leader's worker
        texts = texts if isinstance(texts, WorkerTexts) else WorkerTexts(texts)
        self.config = config
        self.corpus = texts.shared
        self.engine = engine
        self.events = events
        corpus = texts.shared
        self.device = device
        self.folder = folder
        self.reader = ShardReader(texts.read, config, self._starting_shards(texts))
        torch.manual_seed(config.seed)
        model = build_model(
            config.model,
            vocab_size=corpus.vocab_size,
            sequence_length=config.data.sequence_length,
            lora=config.lora,
        )
        self.precision = Precision(config.compute.precision, device, engine.ranks)
        self.placed = self._place(model)
        self.model = self.placed.model
        self.compiled = prepare(self.model, config.compute, device, sharded=self.placed.sharded)
        # Dropout, where a model has it, differs between workers and ranks.
        torch.manual_seed(config.seed + engine.worker + engine.workers * engine.ranks.rank)
        self.inner = inner_optimizer(self.model, config.inner)
        self.schedule = learning_rate_schedule(self.inner, config.inner, config.steps)
        self.mode = self._mode(config.identity(corpus.digest, self.model.description), restoring=restoring)
        self.joined = False
        """In a swarm: this worker has received the state of a run in progress."""
        self.stop_requested = False
        self.after_step: Callable[[], None] = lambda: None
        """Called after every inner step, in the training thread."""
        self._open_step = False  # the last inner step is taken, its rounds are not
        self._saved_before_cut = False
        self._not_finite: LossNotFinite | None = None  # why this worker ends
        self._loss_check = LossCheck(engine.ranks)
        self.accumulation = self._micro_batches(sharing)
        self.evaluator = Evaluator(config, corpus, self.model, self.precision, engine.ranks, self.accumulation)
        self.validation = self._validation()
        self.samples = Samples(config, corpus, self.model, events.emit)
        self.log = StepLog(config, self.mode, self.evaluator, self.precision, engine.ranks, events)
        self.peers = self._peers(texts)
        parts: dict[str, HasState] = {
            "training": self, "reading": self.reader, "mode": self.mode, "precision": self.precision,
            "peers": self.peers,
        }  # fmt: skip
        state = WorkerState(self.model, self.inner, self.schedule, self.mode, parts, engine.ranks.rank)
        workers = None if engine.elastic else engine.workers
        owner = CheckpointOwner(engine.worker, workers, engine.ranks.rank, engine.ranks.count)
        lasting = config.lasting(corpus.digest, self.model.description)
        self.checkpoints = CheckpointStore(folder, owner, config.checkpoint, lasting, events.emit)
        self.checkpointer = Checkpointer(config, state, self.checkpoints, events.emit)
        self._resumed: dict[str, Any] | None = None
        self._failures: list[str] = []  # of the latest rounds, in a row
        self._agreement = Agreement()

    def _place(self, model: LanguageModel) -> PlacedModel:
        """Bring a model that was built on the CPU to where it is trained."""
        ranks = self.engine.ranks
        device = self.device
        if ranks.count == 1:
            return PlacedModel(model, device)
        from diloco.training.sharding import ReplicatedModel, ShardedModel

        if self.config.compute.sharding == "fsdp":
            return ShardedModel(model, ranks, device, self.precision.sharding_policy)
        return ReplicatedModel(model, ranks, device)

    def _starting_shards(self, texts: WorkerTexts) -> list[int]:
        """Return the shards that this worker reads from its first step on."""
        assert not self.engine.elastic, "SwarmTraining is for workers that come and go"
        check_disjoint(texts.shared, self.engine.workers)
        return worker_shards(texts.shared.shards, self.engine.worker, self.engine.workers)

    def _mode(self, identity: str, *, restoring: bool) -> Mode:
        weight = self._weight()
        if self.config.mode == "data-parallel":
            assert isinstance(self.engine, Engine), "RunConfig refuses several ranks in this mode"
            return DataParallel(
                self.model,
                self.inner,
                self.engine,
                sync=self.config.sync,
                weight=weight,
                identity=identity,
                by_tokens=self.config.data.partition == "iid",
                restoring=restoring,
            )
        mode = DiLoCoMode(
            self.model, self.inner, self.engine, self.config, self.precision, identity, weight, restoring=restoring
        )
        loop = mode.averager
        loop.on_post = self._on_post
        loop.on_round = self._on_round
        loop.on_cut = self._on_cut
        return mode

    def _micro_batches(self, sharing: int) -> int:
        """Return the number of micro-batches of a step: as given, one on the CPU, as few as fit on a GPU; an event
        tells it."""
        if self.config.training.accumulation is not None or self.device.type != "cuda":
            return self.config.training.least_accumulation
        ranks = self.engine.ranks
        workers = max(2, self.engine.workers) if self.engine.elastic else self.engine.workers
        placement = Placement(workers, ranks.count, cuda=True, precision=self.precision.name)
        budget = budget_bytes(self.device, sharing)
        accumulation = fewest_micro_batches(
            self.config, placement, self.model, self._trial_loss, self.corpus.vocab_size, self.device, budget
        )
        rows = self.config.training.batch_size // ranks.count // accumulation
        tried = ranks.count == 1
        self.events.emit(MicroBatchesEvent(accumulation=accumulation, rows=rows, tried=tried, budget_bytes=budget))
        return accumulation

    def _trial_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast():
            return self.placed.loss(tokens, targets)

    def _validation(self) -> Validation:
        return Validation(self.config, self.evaluator, self.engine, self.events, leader=self.leader)

    def _peers(self, texts: WorkerTexts) -> Peers:
        del texts
        return FixedPeers(self.config, self.engine)

    def _weight(self) -> float:
        """Return the weight of this worker's contributions: its tokens a step, or (paper) the size of its shards if not
        i.i.d."""
        if self.config.data.partition != "iid":
            return self.reader.weight
        return float(self.config.tokens_per_step)

    def run(self) -> None:
        """Train to the end or to a stop, whichever comes first; the last agreed parameters end up in model/."""
        config = self.config
        state = self.mode.averager
        self._emit_start()
        if self.leader:
            self.events.emit(CorpusEvent(**self.corpus.meta.event()))
        if self._resumed is not None:
            self.events.emit(ResumedEvent(**self._resumed))
        self.peers.begin(joined=self.joined, stopped=lambda: self.engine.ranks.any(self.stop_requested))
        self.checkpoints.became_due(config.checkpoints_until(state.inner_steps))
        if state.inner_steps == 0:
            self.validation.measure_start(self.mode, joined=self.joined)
        self.log.begin(compiled=self.compiled)
        while state.inner_steps < config.steps or self._open_step:
            if self.engine.ranks.any(self.stop_requested):  # a rank that stopped alone would block the others
                self.mode.request_stop()
            if self.mode.must_end:
                break
            if self._open_step:
                self._open_step = False
                self.mode.post_and_merge()
                self._end_step()
            else:
                self._step(state.inner_steps)
            if self._not_finite is not None:
                continue
            self.peers.check_progress(self._failures, self.log.loss)
            if self.validation.due(state.inner_steps):
                self.validation.measure(self.mode)
            if self.leader:
                self.evaluator.seconds += self.samples.after_step(state.inner_steps)
            if not self._saved_before_cut:
                self.checkpointer.after_step()
        self._finish()

    def _emit_start(self) -> None:
        fields = started_fields(self.config, self.engine, self.model, self.corpus)
        how: dict[str, Any] = {"device": str(self.device), "precision": self.precision.name}
        resolved = resolved_values(
            self.config, mode=self.mode, model=self.model, corpus=self.corpus, compiled=self.compiled, **how
        )
        resolved["training.accumulation"] = self.accumulation
        self.events.emit(WorkerStartedEvent(**fields, **how, resolved=resolved))
        if self.leader:
            write_resolved(self.folder, self.config, resolved)

    def request_stop(self) -> None:
        """End after this step; may be called from a signal handler."""
        self.stop_requested = True

    # Resuming

    def resume(self, start: Start) -> None:
        """Load everything that was saved, or start at the first step if nothing was; called before `run`."""
        self._resumed = self.checkpointer.load(start)
        if start.progress is not None:
            unknown = self.reader.take(start.progress, since=self.mode.averager.inner_steps)
            if unknown:
                self._resumed["notes"].append(
                    f"no checkpoint here says how far the shards {', '.join(map(str, unknown))} had been read: worker "
                    f"{self.engine.worker} reads them from their beginning, so text may repeat within its epoch"
                )
        if self._resumed["new"]:
            self.log.restart()
            self.peers.restart()
            torch.manual_seed(self.config.seed + self.engine.worker)

    def state_dict(self) -> dict[str, Any]:
        """Return what the loop itself saves."""
        return {
            "steps": self.config.steps,
            "failures": self._failures,
            "open_step": self._open_step,
            **self.log.state_dict(),
            **self.validation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._failures = list(state["failures"])
        self._open_step = state["open_step"]
        self.log.load_state_dict(state)
        self.validation.load_state_dict(state)

    # One inner step

    def _step(self, position: int) -> None:
        ranks = self.engine.ranks
        self.peers.before_step()
        set_position(self.schedule, position)  # in a swarm it may have jumped
        windows = self._next_windows()
        parts = self.accumulation
        batches, learnt = micro_batches(windows, ranks, parts, self.device, masked=self.reader.masked)
        self.mode.zero_grad()
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            with self.placed.micro_batch(last=number == len(batches)):
                with self.precision.autocast():
                    part = batch.loss(self.placed.loss) / len(batches)
                self.precision.backward(part)
            loss += part.detach()
        bad = self._loss_check.check(position + 1, loss, now=self._must_know(position + 1))
        if bad is None:
            self._average_gradients(position + 1, loss, learnt)
        elif not self._end_for(bad):
            return
        norm = self._clip()
        rate = self.inner.param_groups[0]["lr"]
        if self.log.due(position + 1) and bad is None:
            self.log.log(position + 1, loss, norm, rate)
        self._update_report()
        self.mode.step()
        self.schedule.step()
        self._end_step()

    def _next_windows(self) -> Int64:
        """Return the worker's next batch. In a swarm, where shards change hands, the first of its ranks reads for all:
        the others may not have heard of it, or not have the file."""
        ranks = self.engine.ranks
        if not self.engine.elastic or ranks.count == 1:
            return self.reader.next()
        shape = (self.config.training.batch_size, self.config.data.sequence_length + 1)
        windows = torch.from_numpy(self.reader.next()) if ranks.rank == 0 else torch.zeros(shape, dtype=torch.int64)
        assert tuple(windows.shape) == shape
        ranks.share(windows.view(-1), [0, *(windows.numel() for _ in range(ranks.count))])
        return windows.numpy()

    def _average_gradients(self, step: int, loss: Tensor, learnt: int | None) -> None:
        """Average the gradients where the mode does. Without a mean no worker can step: if the reason is that gradients
        are not finite, say so."""
        try:
            self.mode.before_clipping(learnt)
        except EngineError as error:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            if all(bool(gradient.isfinite().all()) for gradient in gradients):
                raise
            raise self._emit_bad_loss(BadLoss(step, loss.item(), "with gradients that are not finite")) from error

    def _must_know(self, step: int) -> bool:
        """Return whether this step's loss is needed now: it is logged, or the state after it is saved or is the last
        one."""
        saved = self.config.checkpoints_until(step) > self.config.checkpoints_until(step - 1)
        return saved or self.log.due(step) or step >= self.config.steps

    def _end_for(self, bad: BadLoss) -> bool:
        """Log a loss that is not finite, at once, and end as at a stop: the others hear of it with the next round,
        whose mean has this worker's finite steps alone. (On a GPU one bad step is in them: they are then refused.)

        Returns whether the others' gradients are here, with which this worker takes the step that all take together.
        """
        error = self._emit_bad_loss(bad)
        self.stop_requested = True
        self.mode.request_stop()
        try:
            return self.mode.leave_gradients_out()
        except EngineError as problem:
            raise error from problem

    def _emit_bad_loss(self, bad: BadLoss) -> LossNotFinite:
        rate = self.inner.param_groups[0]["lr"]
        last = self.log.loss
        self.events.emit(LossNotFiniteEvent(step=bad.step, loss=str(bad), learning_rate=rate, last_loss=last))
        self._not_finite = LossNotFinite(self._why_to_end(bad, rate))
        return self._not_finite

    def _why_to_end(self, bad: BadLoss, rate: float) -> str:
        last = "" if self.log.loss is None else f", the last logged loss {self.log.loss:.4g}"
        what = f"the loss of worker {self.engine.worker} is {bad} at step {bad.step} (learning rate {rate:.3g}{last})"
        remedy = f"a lower --inner.lr (now {self.config.inner.lr:g})"
        if self.config.inner.clip_norm is None:
            remedy += " or clipped gradients (--inner.clip_norm 1)"
        if self.engine.elastic and len(self.engine.members()) > 1:
            return f"{what}: it leaves the swarm, and the others train on. If it comes back, it takes their state"
        step = self.checkpoints.common_step
        if self.precision.name != "fp32" and step:
            return (
                f"{what}: begin a new run with {remedy}, or go on from the checkpoint of step {step}, which is from "
                "before, with --resume RUN --compute.precision fp32"
            )
        return f"{what}: to resume would lead to the same loss; begin a new run with {remedy}, and check the data"

    def _end_step(self) -> None:
        """Take in the reports of the step's rounds, and report what this worker has done."""
        self.log.step_taken()
        self.checkpoints.note_reports(self.engine.members())
        self.validation.announce()
        self.peers.after_step(self.log.loss, self.log.tokens())
        self.after_step()
        if self.leader:
            self.peers.list_members()

    def _clip(self) -> Tensor | None:
        limit = self.config.inner.clip_norm
        return None if limit is None else torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def _update_report(self) -> None:
        state = self.mode.averager
        state.report = replace(
            state.report,
            tokens=self.log.tokens(1),
            elapsed_seconds=self.log.seconds(),
            loss=math.nan if self.log.loss is None else self.log.loss,
            checkpoint_step=self.checkpoints.latest,
        )

    def _on_cut(self) -> None:
        """Save this step without its round, which a stopping worker has cut short, to post it again after a resume."""
        if self.precision.loss_scale is None:  # a loss scale changes after the rounds, and cannot be taken back
            self._open_step = True
            self.checkpointer.before_cut()
            self._open_step = False
            self._saved_before_cut = True

    def _on_post(self, key: RoundKey) -> None:
        step = self.mode.averager.inner_steps
        self.events.emit(RoundPostedEvent(sequence=key.sequence, fragment=key.fragment, step=step))
        self.peers.after_post(key.sequence)

    def _on_round(self, event: RoundEvent) -> None:
        self._failures = [*self._failures, event.failure] if event.failure is not None else []
        self.events.emit(round_ended(event, self._agreement))
        self.mode.averager.report = replace(self.mode.averager.report, last_round_seconds=reported_round(event))
        self.peers.after_round(event)

    # The end

    def _finish(self) -> None:
        if self._not_finite is not None:
            self._finish_without_result(self._not_finite)
        if not self._saved_before_cut:
            self.checkpointer.at_end(open_step=self._open_step)
        self.mode.finish(before_confirming=self._last_evaluation)
        self.validation.announce_end()
        self.peers.check_progress(self._failures, self.log.loss)  # rounds in flight have ended only now
        self._emit_end(WorkerFinishedEvent)
        self.peers.check_end()
        if self._writes_model:
            model = self._save_result()
            if model is not None:
                sample(model, self.corpus, self.config, self.events.emit, self.mode.averager.inner_steps)
        self.checkpoints.close()

    def _finish_without_result(self, reason: LossNotFinite) -> NoReturn:
        """End together with the others, and save no checkpoint: the run would come to the same loss again."""
        try:
            self.mode.finish(before_confirming=self._last_evaluation)
        except DiLoCoError as error:
            raise reason from error
        self.validation.announce_end()
        raise reason

    def _last_evaluation(self) -> None:
        self.validation.announce()  # the one before, which the last rounds have reported
        self.mode.ended_at = self.mode.averager.inner_steps
        self.mode.averager.report = replace(self.mode.averager.report, elapsed_seconds=self.log.seconds())
        self.validation.measure_end(self.mode)

    def _emit_end(self, kind: type[WorkerEndedEvent], **more: Any) -> None:
        self.events.emit(
            kind(
                **end_fields(self.mode, self.config.steps),
                resyncs=self.peers.resyncs,
                tokens_by_worker=self.peers.tokens_by_worker(),
                checkpoints_failed=self.checkpoints.failed,
                tokens=self.log.tokens(),
                elapsed_seconds=self.log.seconds(),
                members=round_members(self.engine.members()),
                **more,
            )
        )

    def save(self) -> LanguageModel | None:
        """Write model/. Collective among the worker's ranks; returns the whole model on the first one."""
        model = self.placed.whole()
        if model is not None:
            write_model(model, self.corpus, self.folder)
        return model

    def _save_result(self) -> LanguageModel | None:
        try:
            return self.save()
        except OSError as error:
            self.checkpoints.close()
            step = self.mode.averager.inner_steps
            saved = self.checkpoints.common_step
            reason = error.strerror or str(error)
            self.events.emit(ModelFailedEvent(step=step, reason=reason))
            again = (
                f"the checkpoint of step {saved} is written: continue from it" if saved else "no checkpoint is written"
            )
            raise ModelNotWritten(
                f"training has come to its end at step {step}, but the model cannot be written into "
                f"{self.folder / MODEL_FOLDER}: {reason}. Free some space; {again}"
            ) from error

    def fail(self, error: BaseException) -> None:
        """Write how far this worker came, and save the last agreed parameters; called after an error in `run`."""
        self.checkpoints.close()
        try:
            self._emit_end(WorkerFailedEvent, error=str(error))
            if self.engine.ranks.count > 1:
                if not isinstance(error, EngineError | LossNotFinite):  # the other ranks of the worker have it too
                    raise EngineError("only this rank has the error, and the others may be in another collective")
                self.engine.ranks.agree(None)
            with self.mode.outer_parameters():
                self.save()
        except Exception as problem:  # noqa: BLE001 - the first error is the one to report
            logger.error("the last agreed parameters could not be saved: %s", problem)
