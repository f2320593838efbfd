"""The groups of a model's tensors, one a fragment: what each holds, when it is posted, and its memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.core.config import Merge, SyncConfig
from diloco.core.fragments import Fragment, assign, build_fragments
from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.core.schedule import RoundLengths, Schedule
from diloco.outer.sending import Sending
from diloco.outer.tensors.model_tensors import ModelTensors


@dataclass(frozen=True)
class Group:
    """The names of one fragment's tensors, and the outer optimizer that steps them."""

    names: tuple[str, ...]
    outer: OuterOptimizer
    max_norm_ratio: float | None
    """The bound on norms, as in SyncConfig; None for buffers: statistics of different data may differ by any factor."""
    merge: Merge = "mean"
    """The way of merging, as in SyncConfig; all but parameters is averaged plainly."""
    buffers: bool = False
    """Counted buffers, which are few: they travel whole, with 16 bits at least."""
    sending: Sending | None = None
    """The sender of something else than tensors of the model (methods/second_moments.py); there is no fragment then."""

    @property
    def auxiliary(self) -> bool:
        """Averaged beside the parameters: its rounds are no outer steps, and no rounds to the user."""
        return self.buffers or self.sending is not None


def lay_groups(
    tensors: ModelTensors,
    sync: SyncConfig,
    outer: OuterOptimizer,
    growth: RoundLengths | None,
    more: Sequence[Group],
) -> tuple[list[Group], Schedule]:
    """Lay out what each fragment holds, and when it is posted. `more`: groups that travel with the last fragment."""
    groups = [
        Group(tuple(names), outer, sync.max_norm_ratio, sync.merge) for names in assign(list(tensors.averaged), sync)
    ]
    offsets = Schedule.spread(sync.num_inner_steps, len(groups)).offsets
    if tensors.averaged_buffers:  # a plain mean is the outer optimizer SGD(1.0); they travel with the last fragment
        groups.append(Group(tuple(tensors.averaged_buffers), SGD(lr=1.0), None, buffers=True))
    groups += more
    offsets += offsets[-1:] * (len(groups) - len(offsets))
    return groups, Schedule(sync.num_inner_steps, offsets, sync.overlap_steps, sync.warm_start, growth)


def cut_fragments(
    groups: Sequence[Group], members: Sequence[Sequence[tuple[str, Tensor]]], sync: SyncConfig
) -> list[Fragment | None]:
    """A fragment for each group, of its (label, tensor) pairs; None where there are none."""
    fragments: list[Fragment | None] = [None] * len(groups)
    for outer in {group.outer: None for group in groups}:
        mine = [i for i, group in enumerate(groups) if group.outer == outer and members[i]]
        labels = [[label for label, _ in members[i]] for i in mine]
        built = build_fragments(dict(pair for i in mine for pair in members[i]), labels, outer, offload=sync.offload)
        for i, fragment in zip(mine, built, strict=True):
            fragments[i] = fragment
    return fragments
