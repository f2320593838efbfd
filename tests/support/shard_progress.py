"""How far all workers together have read the shards."""

from collections.abc import Iterable, Mapping

from diloco.data.order import ShardProgress


def merge_progress(parts: Iterable[Mapping[int, ShardProgress]]) -> dict[int, ShardProgress]:
    """Put together the progress of the shards of all workers; no shard has two readers."""
    union: dict[int, ShardProgress] = {}
    for part in parts:
        assert not union.keys() & part.keys(), "shards must be disjoint"
        union.update(part)
    return union
