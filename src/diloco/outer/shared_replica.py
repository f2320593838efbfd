"""A model that the ranks of one worker hold together, each its rows of every tensor.

Whatever the outer loop writes into parameters goes through here to the worker's other ranks (`changed`): copies that
all of them have are shared, and what FSDP2 has gathered from old shards is dropped. Every method is collective among
the worker's ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from diloco.engines.base import Connection
from diloco.engines.rounds import Report
from diloco.outer.method import Method
from diloco.outer.replica import Replica, refuse_new_parameters
from diloco.outer.sending import Group
from diloco.outer.tensors import ModelTensors, local_tensors, share, take_first


class SharedReplica(Replica):
    """What the replicas of workers of several ranks have in common: in a fixed set (ranked_replica.py), and in a swarm
    (gathered_replica.py)."""

    def __init__(
        self, tensors: ModelTensors, engine: Connection, groups: Sequence[Group], methods: Sequence[Method]
    ) -> None:
        super().__init__(tensors, engine, groups)
        self._moves_at_posts = any(method.travels_a_turn for method in methods)
        self.local = local_tensors(tensors.all, engine.ranks)
        """Every tensor as this rank holds it."""
        take_first(self.local.values(), engine.ranks)

    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        refuse_new_parameters(self.tensors, inner_parameters)
        for tensor in self.local.values():
            tensor.check_in_place()

    def agreed_report(self, report: Report) -> Report:
        """Return the worker's report: any rank may stop it, all must be done.

        An inner step takes as long as on its slowest rank.
        """
        by_rank = self.engine.ranks.gather_numbers(report.stopping, report.done, report.step_seconds)
        stopping, done, seconds = zip(*by_rank, strict=True)
        return replace(report, stopping=any(stopping), done=all(done), step_seconds=max(map(float, seconds)))

    def encoded(self, index: int) -> None:
        """Called when the outer gradient of a fragment was taken, in which a method may have moved the parameters."""
        if self._moves_at_posts:
            self.changed(index)

    def changed(self, index: int | None = None) -> None:
        """Called when parameters of one fragment, or of all, were written here: the worker's ranks must see the
        same."""
        names = self.local if index is None else self.groups[index].names
        share((self.local[name] for name in names), self.engine.ranks)
        for module in self.tensors.sharded_modules:
            module.reshard()  # type: ignore[operator]

    def average_buffers(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.tensors.averaged_buffers and self.local[name].copied:
                self.engine.ranks.average(self.local[name].local)
