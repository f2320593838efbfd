"""Columns of numbers that grow while a run goes on, and what is drawn of them: few points that keep every extreme."""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
_LARGEST = 1 << 60


class Columns:
    """Rows of floats, one column a name; a value that is no number is nan. The first column never decreases."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._columns = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self._columns[self.names[0]])

    def append(self, values: Mapping[str, object]) -> None:
        for name, column in self._columns.items():
            value = values.get(name)
            column.append(value if type(value) is float and -_LARGEST < value < _LARGEST else number(value))
        before = self._columns[self.names[0]]
        if len(before) > 1 and before[-1] < before[-2]:  # clocks of several processes
            before[-1] = before[-2]

    def amend(self, values: Mapping[str, object]) -> None:
        """Put these numbers into the last row; its other values stay."""
        for name, value in values.items():
            if name in self._columns and not np.isnan(found := number(value)):
                self._columns[name][-1] = found

    def until(self, first: float | None) -> "dict[str, Numbers]":
        """The rows whose first column is at most `first`, as copies."""
        columns = {name: np.array(column, dtype=np.float64) for name, column in self._columns.items()}
        if first is None:
            return columns
        count = int(np.searchsorted(columns[self.names[0]], first, side="right"))
        return {name: column[:count] for name, column in columns.items()}

    def last(self, name: str, first: float | None = None) -> float | None:
        """The last number in a column, of the rows whose first column is at most `first`."""
        column = self._columns[name]
        count = len(column)
        if first is not None:
            count = bisect_right(self._columns[self.names[0]], first)
        return None if not count or np.isnan(column[count - 1]) else column[count - 1]

    def drop(self, name: str, above: float) -> None:
        """Remove the rows in which this column is larger."""
        kept = [index for index, value in enumerate(self._columns[name]) if not value > above]
        for key, column in self._columns.items():
            self._columns[key] = array("d", [column[index] for index in kept])


def number(value: object) -> float:
    """As a float; nan if it is none, or larger than anything that a run counts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return float("nan")
    return float(value)


def finite(value: object) -> float | None:
    """The same, with None instead of nan."""
    found = number(value)
    return None if found != found else found


def count(value: object) -> int:
    """ValueError if it is no whole number, or larger than anything that a run counts."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def thin_out(values: Numbers, points: int) -> NDArray[np.int64]:
    """The indices of at most `points` rows: of each bucket of rows the smallest and the largest value, the first row
    that is nan, and the first and last row of all."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    kept = {0, count - 1}
    edges = np.linspace(0, count, max(1, (points - 2) // 3) + 1).astype(int)
    for start, end in pairwise(edges):
        bucket = values[start:end]
        missing = np.isnan(bucket)
        if missing.any():
            kept.add(int(start + np.argmax(missing)))
        if not missing.all():
            kept.update((int(start + np.nanargmin(bucket)), int(start + np.nanargmax(bucket))))
    return np.array(sorted(kept))


def mean_by_step(steps: Numbers, values: Numbers, points: int) -> dict[str, Numbers]:
    """Of the rows of all workers together: mean, smallest and largest value at each step, or in each of `points`
    ranges of steps if there are more. Values that are nan are left out; a range of nothing else is nan."""
    distinct = np.unique(steps)
    edges = distinct
    if len(distinct) > points:  # the last one is always there
        edges = distinct[np.linspace(len(distinct) - 1, 0, points).astype(int)[::-1]]
    which = np.searchsorted(edges, steps)  # the first edge that is not below the step
    finite = ~np.isnan(values)
    counts = np.bincount(which[finite], minlength=len(edges))[: len(edges)]
    sums = np.bincount(which[finite], weights=values[finite], minlength=len(edges))[: len(edges)]
    low, high = np.full(len(edges), np.inf), np.full(len(edges), -np.inf)
    np.minimum.at(low, which[finite], values[finite])
    np.maximum.at(high, which[finite], values[finite])
    empty = counts == 0
    mean = np.where(empty, np.nan, sums / np.maximum(counts, 1))
    return {
        "step": edges,
        "mean": mean,
        "low": np.where(empty, np.nan, low),
        "high": np.where(empty, np.nan, high),
    }


def as_json(values: Sequence[float] | Numbers) -> list[float | None]:
    """Six digits, and null where there is no number."""
    return [None if not np.isfinite(value) else float(f"{value:.6g}") for value in values]


def exact_json(values: Sequence[float] | Numbers) -> list[float | None]:
    """As they are, for steps and times; null where there is no number."""
    return [None if not np.isfinite(value) else round(float(value), 3) for value in values]
