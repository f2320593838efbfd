"""Columns of numbers that grow while a run goes on."""

from array import array
from bisect import bisect_right
from collections.abc import Mapping

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

    def row(self, index: int) -> dict[str, float | None]:
        """The numbers of a row, the last one at -1; all None if there are no rows."""
        if not len(self):
            return dict.fromkeys(self.names)
        return {name: finite(column[index]) for name, column in self._columns.items()}

    def drop(self, name: str, above: float) -> None:
        """Remove the rows in which this column is larger."""
        kept = [index for index, value in enumerate(self._columns[name]) if not value > above]
        for key, column in self._columns.items():
            self._columns[key] = array("d", [column[index] for index in kept])


def number(value: object) -> float:
    """The value as a float; nan if it is no number, or larger than anything that a run counts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return float("nan")
    return float(value)


def finite(value: object) -> float | None:
    """The value as a float; None where `number` gives nan."""
    converted = number(value)
    return None if converted != converted else converted
