"""The model of a worker where workers of a fixed set have several ranks: cut into lanes, with one decision for all
ranks of a worker.

A round is the same round in every lane. All lanes decide on the same claims (the whole worker's norm, weight and
digest) and so come to the same decision; the ranks of a worker make sure of it: the round is good if it is good in all
lanes of all ranks; if a lane fails, no lane is merged, and if a rank cannot go on, none of its worker does. So a worker
is never in two rounds at once.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import SyncConfig
from diloco.core.fragments import layout_digest
from diloco.core.lanes import LaneLayout, Piece, make_lanes
from diloco.engines.base import Connection, Engine, PendingRound
from diloco.engines.rounds import (
    Comparison,
    Contribution,
    GlobalState,
    Report,
    RoundKey,
    RoundPhases,
    RoundResult,
)
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import EngineError, RoundFailed
from diloco.outer.method import Method
from diloco.outer.replica import Lane, make_sending
from diloco.outer.rounds import PendingWorkerRound
from diloco.outer.sending import NO_DIGEST, Group, cut_fragments
from diloco.outer.shared_replica import SharedReplica
from diloco.outer.tensors import ModelTensors


class RankedReplica(SharedReplica):
    """The replica of a worker among workers of several ranks; `lanes` are those that this rank is in."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        groups: Sequence[Group],
        sync: SyncConfig,
        methods: Sequence[Method],
        common: tuple[object, ...],
    ) -> None:
        """Collective: all ranks of all workers. `common`: what else must be the same on all workers."""
        super().__init__(tensors, engine, groups, methods)
        self._sync = sync
        self._methods = methods
        self._common = common
        layouts = make_lanes({name: tensor.shape for name, tensor in self.local.items()}, engine.sizes)
        engines = engine.lanes([layout.owners for layout in layouts])
        for number, (layout, lane_engine) in enumerate(zip(layouts, engines, strict=True)):
            if lane_engine is not None:
                self.lanes.append(self._lane(number, layout, lane_engine))
        self._num_lanes = len(layouts)
        self.digests = [NO_DIGEST] * len(groups)
        self.update_digests()

    def _lane(self, number: int, layout: LaneLayout, engine: Engine) -> Lane:
        """Cut out what this rank has of a lane. Tensors in no group are made equal at the start."""
        pieces: dict[str, list[Piece]] = {name: [] for name in self.local}
        for piece in layout.pieces:
            pieces[piece.name].append(piece)
        grouped = [[piece for name in group.names for piece in pieces.pop(name)] for group in self.groups]
        views = [[(str(piece), self._view(piece)) for piece in group] for group in grouped]
        fragments = cut_fragments(self.groups, views, self._sync)
        sending = make_sending(len(self.lanes), self.groups, fragments, grouped, self._sync, self.engine, self._methods)
        start = {str(piece): self._view(piece) for rest in pieces.values() for piece in rest}
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(start.items())]
        cut = (self.engine.sizes, [list(map(str, group)) for group in grouped])
        digest = layout_digest([f.tensors_by_name for f in fragments if f], shapes, *self._common, *cut)
        return Lane(number, engine, fragments, grouped, sending, start, digest)

    def _view(self, piece: Piece) -> Tensor:
        return self.local[piece.name].view(piece, self.engine.ranks.rank)

    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        """Return the norm of the whole worker's outer gradient, and its report."""
        self.average_buffers(self.groups[index].names)
        own = 0.0 if dropped else math.hypot(*(lane.encode(index, turn) for lane in self.lanes))
        self.encoded(index)
        norms = [norm for (norm,) in self.engine.ranks.gather_numbers(own)]
        return math.hypot(*norms), self.agreed_report(report)

    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> PendingWorkerRound:
        return RankedRound(self.lanes, self.engine.ranks, key, contributions, seconds)

    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        """Take the outer step of a fragment in every lane; returns the norm of the whole mean outer gradient."""
        lanes = zip(self.lanes, means, strict=True)
        own = [lane.merge(index, mean, mixing, turn, plain=plain) for lane, mean in lanes]
        self.update_digests()
        self.changed(index)
        return math.hypot(*(norm for (norm,) in self.engine.ranks.gather_numbers(math.hypot(*own))))

    def update_digests(self) -> None:
        """Compute the worker's digest of each fragment: a hash of its lanes' digests in lane order, the same on all
        ranks."""
        lanes = range(self._num_lanes)
        mine = {lane.number: lane for lane in self.lanes}
        own = [mine[n].digests[index] if n in mine else NO_DIGEST for index in range(len(self.groups)) for n in lanes]
        by_rank = self.engine.ranks.gather("".join(own).encode())
        for index in range(len(self.groups)):
            cells = [index * self._num_lanes + number for number in lanes]
            # NO_DIGEST, of a rank that is not in the lane, is the lowest.
            by_lane = [max(rank[16 * cell : 16 * cell + 16].decode() for rank in by_rank) for cell in cells]
            joined = hashlib.sha256("".join(by_lane).encode()).hexdigest()[:16]
            self.digests[index] = by_lane[0] if self._num_lanes == 1 else joined

    def fetch_states(self) -> list[GlobalState] | None:
        """Return the others' state for each lane, if this worker must take it over. Raises on all its ranks or on
        none."""
        states: list[GlobalState | None] = []
        problem = None
        try:
            states = [lane.engine.fetch_state() for lane in self.lanes]
        except EngineError as error:
            problem = error
        self.engine.ranks.agree(problem)
        theirs = [state for state in states if state is not None]
        return theirs if len(theirs) == len(self.lanes) else None


class RankedRound:
    """A round in flight in all lanes of this rank."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        ranks: WorkerRanks,
        key: RoundKey,
        contributions: Sequence[Contribution],
        seconds: float,
    ) -> None:
        self._key = key
        self._ranks = ranks
        self.norm = contributions[0].norm
        self._error: EngineError | None = None  # raised where all ranks can hear of it
        self._pending: list[PendingRound] = []
        try:
            for lane, contribution in zip(lanes, contributions, strict=True):
                self._pending.append(lane.engine.start_round(key, contribution, seconds))
        except EngineError as error:
            self._error = error

    def wait(self) -> RoundResult:
        """Return the whole worker's result. Raises RoundFailed or EngineError on all its ranks or on none."""
        results: list[RoundResult] = []
        failures: list[RoundFailed] = []
        try:
            for pending in self._pending:
                try:
                    results.append(pending.wait())
                except RoundFailed as failure:
                    failures.append(failure)
        except EngineError as error:
            self._error = self._error or error
        self._ranks.agree(self._error)
        self._agree_on(failures, results)
        own = [
            [float(result.bytes_sent), float(result.bytes_received), *result.comparison.numbers] for result in results
        ]
        sent, received, *numbers = self._ranks.sums(*(sum(column) for column in zip(*own, strict=True)))
        return replace(
            results[0],
            bytes_sent=int(sent),
            bytes_received=int(received),
            seconds=max(result.seconds for result in results),
            comparison=Comparison.of_numbers(numbers, len(results[0].contributors)),
            phases=RoundPhases(),  # each lane has its own
            lane_means=tuple(result.mean for result in results),
        )

    def _agree_on(self, failures: Sequence[RoundFailed], results: Sequence[RoundResult]) -> None:
        rows = self._ranks.gather_numbers(
            bool(failures),
            bool(results),
            any(failure.stopping for failure in failures),
            any(failure.resync for failure in failures),
        )
        failed, succeeded, stopping, resync = (any(column) for column in zip(*rows, strict=True))
        if failed:
            reason = failures[0].reason if failures else f"round {self._key.sequence} failed on another rank"
            # What failed here in part, others may have merged.
            raise RoundFailed(reason, stopping=stopping, resync=resync or succeeded)
