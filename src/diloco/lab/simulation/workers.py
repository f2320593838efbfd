"""The workers of a simulation: k DiLoCo optimizers over the local engine, taken in turn."""

from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev

import torch
from torch import Tensor

from diloco.core.config import FaultsConfig
from diloco.core.merging import cosines
from diloco.core.outer_optimizers import outer_optimizer
from diloco.core.rates import LearningRateCurve
from diloco.core.schedule import Schedule
from diloco.engines.local import LocalSwarm
from diloco.lab.arm import Arm, RoundStatistics
from diloco.lab.simulation.batches import CorpusTokens
from diloco.lab.simulation.checkpoint import ArmState
from diloco.lab.simulation.machines import Clock, presence_table, round_bytes, work_table
from diloco.lab.simulation.replicas import Replicas
from diloco.methods.growing_rounds import GrowingRounds
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from diloco.outer.tensors import as_tensors, copy_into

MISSED_ROUND_DECAY = 0.5
"""With the rule `age_decayed`: the factor of a contribution's weight for each missed round."""


class Workers:
    """All workers of one arm; `take_step` is an inner step of each, with the rounds that are due."""

    def __init__(self, arm: Arm, seed: int, replicas: Replicas, text: CorpusTokens, clock: Clock) -> None:
        self.arm = arm
        self.replicas = replicas
        self.clock = clock
        self._present = presence_table(arm, seed)
        self._working = work_table(arm, seed)
        self._all_work = bool(self._working.all())
        self._step = 0
        self.statistics: list[RoundStatistics] = []
        self.bytes_sent = 0
        """Bytes that all workers together have sent."""
        self._events: list[tuple[int, RoundEvent]] = []
        self._shares = [text.weight(arm, worker) for worker in range(arm.workers)]
        """The weight of an inner step of each worker."""
        sync = arm.sync_config
        curve = _curve(arm)
        growth = None if sync.growth is None else GrowingRounds(sync.growth, curve)
        turns = Schedule(sync.num_inner_steps, (0,), sync.overlap_steps, growth=growth).turns_until(arm.steps)
        outer = outer_optimizer(arm.outer_config, turns)
        faults = FaultsConfig(arm.drop, seed) if arm.drop else None
        self.optimizers: list[DiLoCo] = []
        for engine, model, inner in zip(
            LocalSwarm(arm.workers).engines(), replicas.models, replicas.inners, strict=True
        ):
            optimizer = DiLoCo(
                model,
                inner,
                engine,
                sync=sync,
                outer=outer,
                weight=self._shares[engine.worker],
                learning_rates=None if growth is None else curve,
                faults=faults,
            )
            optimizer.unfinished.silence()
            optimizer.loop.on_round = lambda event, worker=engine.worker: self._events.append((worker, event))
            self.optimizers.append(optimizer)

    @property
    def rounds(self) -> int:
        return max(optimizer.loop.rounds for optimizer in self.optimizers)

    @property
    def rounds_failed(self) -> int:
        return sum(optimizer.failures + optimizer.loop.counters.rounds_dropped for optimizer in self.optimizers)

    @property
    def steps_taken(self) -> int:
        """Inner steps that all workers together have taken."""
        return sum(optimizer.loop.state.steps_taken for optimizer in self.optimizers)

    def most_advanced(self) -> int:
        """Return a worker that has merged the most rounds: its anchor is the run's."""
        return max(range(self.arm.workers), key=lambda worker: self.optimizers[worker].loop.rounds)

    def saved(self) -> ArmState | None:
        """Return everything but the replicas' memory, between two steps.

        Rounds in flight are settled and stay unmerged.
        None: a worker cannot be saved after a round that went wrong for it, until its next round has repaired that.
        """
        for optimizer in self.optimizers:
            optimizer.loop.settle()
        if any(optimizer.loop.unsavable() for optimizer in self.optimizers):
            return None
        tensors: dict[str, Tensor] = {}
        numbers = []
        for worker, optimizer in enumerate(self.optimizers):
            pieces, counted = optimizer.loop.saved()
            tensors |= {f"{worker}/{name}": tensor.cpu() for name, tensor in as_tensors(pieces).items()}
            numbers.append(counted | {"codec_errors": optimizer.loop.replica.lanes[0].codec_errors})
        rows = [asdict(row) for row in self.statistics]
        return ArmState(tensors, {"workers": numbers, "statistics": rows, "bytes_sent": self.bytes_sent})

    def load(self, saved: ArmState, step: int) -> None:
        """Go on after this step; the replicas' memory has been loaded."""
        self._step = step
        self.bytes_sent = saved.numbers["bytes_sent"]
        self.statistics = [RoundStatistics(**row) for row in saved.numbers["statistics"]]
        for worker, (optimizer, counted) in enumerate(zip(self.optimizers, saved.numbers["workers"], strict=True)):
            memory, loaded = optimizer.loop.memory_to_load(counted)
            copy_into(memory, saved.with_prefix(f"{worker}/"))
            loaded()
            optimizer.loop.replica.lanes[0].codec_errors[:] = counted["codec_errors"]

    def take_step(self) -> None:
        present = self._present[self._step].tolist()
        working = self._working[self._step].tolist()
        if not self._all_work:
            self._start_arrivals_from_anchor(present)
        self.replicas.take_step(None if self._all_work else working)
        self.clock.take_step(working, present)
        self._step += 1
        for optimizer, works in zip(self.optimizers, working, strict=True):
            state = optimizer.loop.state
            if works:
                state.inner_steps += 1
            else:
                state.jump_to(state.inner_steps + 1)
        self._post(present)
        had_dropped = [any(posted.dropped for posted in optimizer.loop.in_flight) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            optimizer.merge()
        if self.arm.missed == "discarded":
            for optimizer, dropped in zip(self.optimizers, had_dropped, strict=True):
                if dropped:
                    optimizer.loop.state.start_from_anchor()
        self._collect_statistics()

    def _start_arrivals_from_anchor(self, present: list[bool]) -> None:
        """Let the workers that come, or come back, in this step begin at the anchor."""
        previous = self._present[self._step - 1].tolist() if self._step else present
        for optimizer, is_present, was_present in zip(self.optimizers, present, previous, strict=True):
            if is_present and not was_present:
                optimizer.loop.state.start_from_anchor()

    def _post(self, present: list[bool]) -> None:
        first = self.optimizers[0].loop
        for worker, optimizer in enumerate(self.optimizers):
            if worker in self.arm.hostile and first.schedule.posts_at(first.inner_steps):
                _reverse_outer_gradient(optimizer)
            self._set_weight(worker, optimizer)
            optimizer.post()
        for posted in first.in_flight:
            if posted.at_step == first.inner_steps:
                self._count_bytes(posted.key.sequence, posted.key.fragment, present)

    def _set_weight(self, worker: int, optimizer: DiLoCo) -> None:
        """Set the weight that the outer loop gives each inner step, so that the arm's rule for missed rounds holds."""
        if self.arm.missed in ("token_weighted", "discarded"):
            return
        state = optimizer.loop.state
        H = self.arm.sync_config.num_inner_steps
        steps = max(1, state.steps_taken - state.merged_at[0])
        missed_rounds = max(0, -(-steps // H) - 1)
        decay = MISSED_ROUND_DECAY**missed_rounds if self.arm.missed == "age_decayed" else 1.0
        optimizer.loop.weight = self._shares[worker] * decay * H / steps

    def _count_bytes(self, sequence: int, fragment: int, present: list[bool]) -> None:
        """Count the bytes of a round between the workers that are there. Second moments that are not due cost a header
        only."""
        loop = self.optimizers[0].loop
        sending = loop.replica.lanes[0].sending[fragment]
        header_only = sending.is_header_only(loop.schedule.turn_of(sequence), done=False)
        sent_by_worker = round_bytes(None if header_only else sending.vector, sum(present))
        self.bytes_sent += sum(sent_by_worker)
        self.clock.post(sequence, max(sent_by_worker), present)

    def finish(self) -> None:
        """Bring the remaining work into the anchors, in a last round of each fragment, one after another.

        A worker that is absent has no weight in it; one that is there counts, with work left or without.
        """
        loop = self.optimizers[0].loop
        present = self._present[-1].tolist()
        for optimizer, is_present in zip(self.optimizers, present, strict=True):
            optimizer.loop.merge_pending()
            optimizer.loop.report = replace(optimizer.loop.report, done=True)
            if not is_present:
                optimizer.loop.weight = 0.0
        states = [optimizer.loop.state for optimizer in self.optimizers if optimizer.loop.weight]
        for fragment in loop.schedule.rotation(loop.inner_steps):
            if all(state.steps_taken == state.merged_at[fragment] for state in states):
                continue  # no worker has taken a step since
            for worker, optimizer in enumerate(self.optimizers):
                if worker in self.arm.hostile:
                    _reverse_outer_gradient(optimizer)
                if present[worker]:
                    self._set_weight(worker, optimizer)
                optimizer.loop.post_fragment(fragment)
            self._count_bytes(loop.in_flight[-1].key.sequence, fragment, present)
            for optimizer in self.optimizers:
                optimizer.loop.merge_pending()
        self._collect_statistics()

    def _collect_statistics(self) -> None:
        """Turn the events of this step into statistics, one row for each round that ended."""
        rounds: dict[int, list[tuple[int, RoundEvent]]] = {}
        for worker, event in self._events:
            rounds.setdefault(event.key.sequence, []).append((worker, event))
        self._events.clear()
        for sequence, events in rounds.items():
            for worker, event in events:
                if event.failure is None:
                    self.clock.merge(sequence, worker)
            self.statistics.append(_statistics([event for _, event in events]))


@torch.no_grad()
def _reverse_outer_gradient(optimizer: DiLoCo) -> None:
    """θ ← 2A − θ: the outer gradient A − θ changes its sign and keeps its norm. The merge that follows replaces θ."""
    for _, fragment in optimizer.loop.state.fragments_of(0):
        for span, anchor, _ in fragment.visit():
            fragment.write(span, 2 * anchor - fragment.read(span))


@dataclass(frozen=True)
class LaterCurve(LearningRateCurve):
    """The learning rates from step `first` of a schedule on."""

    first: int = 0

    def factor(self, step: int) -> float:
        return super().factor(self.first + step)


def _curve(arm: Arm) -> LaterCurve:
    inner = arm.inner_config
    return LaterCurve(inner.lr, arm.total_steps, inner.warmup_steps, inner.final_lr_ratio, arm.pretraining_steps)


def _statistics(events: list[RoundEvent]) -> RoundStatistics:
    first = next((event for event in events if event.result is not None), events[0])
    result = first.result
    pairs = cosines(result.contributors, result.comparison.products) if result is not None else []
    pair_cosines = [cosine for _, _, cosine in pairs]
    norms = sorted(event.norm for event in events if not event.dropped)
    median = norms[(len(norms) - 1) // 2] if norms else 0.0
    errors = [event.codec_error for event in events if event.codec_error is not None]
    return RoundStatistics(
        step=first.inner_step,
        fragment=first.key.fragment,
        contributors=len(result.contributors) if result is not None else 0,
        cosine=fmean(pair_cosines) if pair_cosines else None,
        cosine_spread=pstdev(pair_cosines) if pair_cosines else None,
        norm=fmean(event.norm for event in events),
        mean_norm=first.mean_norm,
        codec_error=errors[0] if errors else None,
        norm_ratio=norms[-1] / median if median else None,
    )
