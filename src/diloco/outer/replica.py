"""A worker's model as the outer loop sees it: its lanes, and the engine that averages them.

`OneRankReplica` is that of a worker of one rank, where every other worker is of one rank too: one lane, and nothing to
agree on. background.py has one that computes beside training, ranked_replica.py that of workers of several ranks.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import SyncConfig
from diloco.core.fragments import layout_digest
from diloco.core.lanes import Piece
from diloco.engines.base import Connection, PendingRound
from diloco.engines.rounds import Contribution, GlobalState, Report, RoundKey, RoundResult
from diloco.errors import ConfigError
from diloco.outer.lane import Lane, lay_sending
from diloco.outer.method import Method
from diloco.outer.rounds import WorkerRound
from diloco.outer.tensors.groups import Group, cut_fragments
from diloco.outer.tensors.local_tensors import local_tensors
from diloco.outer.tensors.model_tensors import ModelTensors


class Replica(ABC):
    """The lanes of this rank, and what the whole worker does with them."""

    def __init__(self, tensors: ModelTensors, engine: Connection, groups: Sequence[Group]) -> None:
        """`groups` say what each fragment is."""
        self.tensors = tensors
        self.engine = engine
        self.groups = groups
        self.lanes: list[Lane] = []
        self.digests: list[str] = []
        """Those of the worker's anchors, one for each fragment."""
        self.merge_lock: AbstractContextManager[object] = threading.Lock()
        """Held while a round is merged."""
        self.lock: AbstractContextManager[object] = self.merge_lock
        """See OuterState.lock."""

    @abstractmethod
    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        """The model still has the trainable parameters that it had when DiLoCo was built, in the same memory."""

    @abstractmethod
    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        """The outer gradient of a fragment into what travels, unless it is dropped: its norm, the worker's report."""

    @abstractmethod
    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> WorkerRound:
        """One contribution for each lane; returns at once."""

    @abstractmethod
    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        """The outer step of a fragment; the norm of the mean outer gradient."""

    def are_finite(self, index: int, means: Sequence[EncodedVector]) -> bool:
        """Whether all values of a fragment's mean are finite."""
        del index
        return all(mean.is_finite() for mean in means)

    def finish_posts(self) -> None:  # noqa: B027 - only background.py has posts that go on
        """Wait until the rounds posted so far are with the engine."""

    @abstractmethod
    def changed(self, index: int | None = None) -> None:
        """Parameters of one fragment, or of all, were written: what FSDP2 has gathered of them is out of date."""

    def update_digests(self) -> None:  # noqa: B027 - of one lane, they are the worker's
        """Make the worker's digests of those of its lanes."""

    def average_buffers(self, names: Iterable[str]) -> None:  # noqa: B027 - a single rank has nothing to average
        """What each rank has counted by itself (batch-norm statistics) becomes the worker's mean."""

    @abstractmethod
    def fetch_states(self) -> list[GlobalState] | None:
        """The others' state for each lane, if this worker must take it over."""


class OneRankReplica(Replica):
    """The model of a worker of one rank."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        groups: Sequence[Group],
        sync: SyncConfig,
        methods: Sequence[Method],
        common: tuple[object, ...],
    ) -> None:
        """`common` is what else must be the same on all workers."""
        super().__init__(tensors, engine, groups)
        local = local_tensors(tensors.all, engine.ranks)
        memory = {name: tensor.local for name, tensor in local.items()}
        self._sharded = [tensor for tensor in local.values() if tensor.local is not tensor.tensor]
        pieces = [[Piece(name, tuple(memory[name].shape), 0, memory[name].numel()) for name in g.names] for g in groups]
        fragments = cut_fragments(groups, [[(name, memory[name]) for name in g.names] for g in groups], sync)
        inside = {name for group in groups for name in group.names}
        start = {name: tensor for name, tensor in memory.items() if name not in inside}
        sending = lay_sending(0, groups, fragments, pieces, sync, engine, methods)
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(start.items())]
        layout = layout_digest([fragment for fragment in fragments if fragment], shapes, *common)
        [lane_engine] = engine.lanes([(0,) * len(engine.sizes)])
        assert lane_engine is not None
        self.lane = Lane(0, lane_engine, fragments, pieces, sending, start, layout)
        self.lanes = [self.lane]
        self.digests = self.lane.digests

    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        refuse_new_parameters(self.tensors, inner_parameters)
        for tensor in self._sharded:
            tensor.check_in_place()

    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        return 0.0 if dropped else self.lane.encode(index, turn), report

    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> WorkerRound:
        return _LaneRound(self.lane.engine.start_round(key, contributions[0], seconds), contributions[0].norm)

    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        norm = self.lane.merge(index, means[0], mixing, turn, plain=plain)
        self.changed(index)
        return norm

    def changed(self, index: int | None = None) -> None:
        del index
        for module in self.tensors.sharded_modules:
            module.reshard()  # type: ignore[operator]

    def fetch_states(self) -> list[GlobalState] | None:
        state = self.lane.engine.fetch_state()
        return None if state is None else [state]


@dataclass(frozen=True)
class _LaneRound:
    """A round of a worker with one lane."""

    pending: PendingRound
    norm: float

    def wait(self) -> RoundResult:
        return self.pending.wait()


def refuse_new_parameters(tensors: ModelTensors, inner_parameters: Iterable[Tensor]) -> None:
    """A parameter that is unfrozen or added after DiLoCo was built would train without being averaged."""
    known = tensors.averaged_ids
    added = [tuple(p.shape) for p in inner_parameters if p.requires_grad and id(p) not in known]
    for name, tensor in tensors.equal_at_start.items():
        if tensor.requires_grad:
            raise ConfigError(
                f"parameter '{name}' was frozen when DiLoCo was built and is trainable now: it would not be averaged. "
                "Set requires_grad before building DiLoCo, and build it anew to change it"
            )
    if added:
        raise ConfigError(
            f"the inner optimizer got parameters after DiLoCo was built (shapes {added}): they would not be averaged. "
            "Add them before building DiLoCo"
        )
