"""Non-i.i.d. shards by label: a label is in one shard whole, so that each worker reads labels of its own.

The labels of all training passages are counted first; then each label, the largest first, goes to the shard with the
least text. A label that a long stream brings only later goes to the shard with the fewest tokens at that moment.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

from diloco.atomic_files import write_file
from diloco.data.preparation.passages import Passage
from diloco.data.preparation.writer import Partition
from diloco.errors import DataError

MAX_LABELS = 1024
_REPORT_EVERY = 256

Labels = dict[str, int]
"""The shard of each label."""


def find_labels(passages: Iterable[Passage], shards: int, report: Callable[[], None]) -> Labels:
    """Counts the training text of each label, and shares the labels out evenly; `report` is called now and then."""
    sizes: Counter[str] = Counter()
    for number, passage in enumerate(passages):
        if not passage.is_validation:
            sizes[checked_label(passage.label)] += passage.size_bytes
        if len(sizes) > MAX_LABELS:
            raise DataError(
                f"data.partition = labels: the documents have more than {MAX_LABELS} different labels; choose a field "
                "that names few domains (--data.label_field)"
            )
        if number % _REPORT_EVERY == 0:
            report()
    if len(sizes) < 2:
        found = ", ".join(sizes) or "none"
        raise DataError(
            f"data.partition = labels needs documents of at least two labels, and found: {found}; choose another "
            "--data.label_field, or --data.partition iid"
        )
    return share_out(sizes, shards)


def share_out(sizes: Mapping[str, int], shards: int) -> Labels:
    """Each label to the shard with the least text, the largest first."""
    loads = [0] * shards
    found: Labels = {}
    for label, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        found[label] = shard = loads.index(min(loads))
        loads[shard] += size
    return found


def checked_label(label: str | None) -> str:
    if label is None:
        raise DataError(
            "data.partition = labels: the documents have no labels; name the field that has them (--data.label_field), "
            "or give a folder of 2 to 256 files, whose names are labels"
        )
    return label


def save_labels(path: Path, labels: Labels) -> None:
    write_file(path, json.dumps(labels))


def load_labels(path: Path) -> Labels:
    labels: Labels = json.loads(path.read_text(encoding="utf-8"))
    return labels


@final
class LabelPartition(Partition):
    def __init__(self, labels: Labels, loads: Sequence[int], written: Mapping[str, Sequence[int]]) -> None:
        """`loads`: the tokens of each shard so far; `written`: those of each label in each shard."""
        late = {label: list(tokens).index(max(tokens)) for label, tokens in written.items() if label not in labels}
        self._labels, self._loads = labels | late, list(loads)

    def assign(self, passages: Sequence[tuple[Passage, int]]) -> list[int]:
        shards = []
        for passage, tokens in passages:
            label = checked_label(passage.label)
            shard = self._labels.setdefault(label, self._loads.index(min(self._loads)))
            self._loads[shard] += tokens
            shards.append(shard)
        return shards
