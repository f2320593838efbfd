"""A worker's model on one of its ranks: its tensors, cut into lanes, and what keeps the ranks' copies the same.

Whatever the outer loop writes into parameters goes through here to the other ranks (`changed`): copies that all of them
have are shared, and what FSDP2 has gathered from old shards is dropped.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.core.lanes import lay_lanes
from diloco.engines.base import Connection
from diloco.engines.rounds import GlobalState
from diloco.errors import EngineError
from diloco.outer.lane import Group, LaneBuilder
from diloco.outer.model_tensors import ModelTensors
from diloco.outer.ranks.local_tensors import local_tensors, share, take_first


class Replica:
    """`groups` say what each fragment is; `lanes` are those that this rank is in."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        groups: Sequence[Group],
        sync: SyncConfig,
        common: tuple[object, ...],
    ) -> None:
        """Collective: all ranks of all workers. `common`: what else must be the same on all workers."""
        self.tensors, self.engine, self.groups = tensors, engine, groups
        self._local = local_tensors(tensors.all, engine.ranks)
        take_first(self._local.values(), engine.ranks)
        layouts = lay_lanes({name: one.shape for name, one in self._local.items()}, engine.sizes)
        alone = len(engine.sizes) == 1 and not engine.elastic
        builder = LaneBuilder(self._local, groups, engine.ranks.rank, engine.sizes, sync, common, alone)
        engines = engine.lanes([layout.owners for layout in layouts])
        mine = [(n, layout, e) for n, (layout, e) in enumerate(zip(layouts, engines, strict=True)) if e is not None]
        self.lanes = [builder.build(*lane) for lane in mine]
        self.num_lanes = len(layouts)

    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        """The model is as it was when DiLoCo was built: the same parameters, in the same memory."""
        self.tensors.check_unchanged(inner_parameters)
        for one in self._local.values():
            one.check_in_place()

    def changed(self, index: int | None = None) -> None:
        """Parameters were written here, of one fragment or of all: the worker's ranks must see the same."""
        names = self._local if index is None else self.groups[index].names
        share((self._local[name] for name in names), self.engine.ranks)
        self.tensors.drop_gathered()

    def settle_buffers(self, names: Iterable[str]) -> None:
        """What each rank has counted by itself (batch-norm statistics) becomes the worker's mean."""
        for name in names:
            if name in self.tensors.averaged_buffers and self._local[name].copied:
                self.engine.ranks.average(self._local[name].local)

    def fetch_states(self) -> list[GlobalState] | None:
        """The others' state for each lane, if this worker must take it over. Raises on all its ranks or on none."""
        states: list[GlobalState | None] = []
        problem = None
        try:
            states = [lane.engine.fetch_state() for lane in self.lanes]
        except EngineError as error:
            problem = error
        self.engine.ranks.agree(problem)
        theirs = [state for state in states if state is not None]
        return theirs if len(theirs) == len(self.lanes) else None
