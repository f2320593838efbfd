"""Columns of numbers that grow while a run goes on."""

from array import array
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from diloco.history.events import LARGEST

Numbers = NDArray[np.float64]


class Columns:
    """A table of floats over time: the column `time`, which never decreases, and one for each name.

    A value that is no number is nan.
    """

    def __init__(self, *names: str) -> None:
        self.names = ("time", *names)
        self._columns = {name: array("d") for name in self.names}

    def __len__(self) -> int:
        return len(self._columns["time"])

    def append(self, values: Mapping[str, object]) -> None:
        """Add a row; a column that `values` does not name gets nan."""
        for name, column in self._columns.items():
            value = values.get(name)
            column.append(value if type(value) is float and -LARGEST < value < LARGEST else number(value))
        times = self._columns["time"]
        if len(times) > 1 and times[-1] < times[-2]:  # clocks of several processes
            times[-1] = times[-2]

    def until(self, time: float | None) -> "dict[str, Numbers]":
        """Return the rows up to a time (None: all of them) as copies."""
        columns = {name: np.array(column, dtype=np.float64) for name, column in self._columns.items()}
        if time is None:
            return columns
        count = int(np.searchsorted(columns["time"], time, side="right"))
        return {name: column[:count] for name, column in columns.items()}

    def last(self, name: str, time: float | None = None) -> float | None:
        """Return the last number of a column in the rows up to a time (None: in all of them)."""
        column = self._columns[name]
        count = len(column) if time is None else bisect_right(self._columns["time"], time)
        return None if not count or np.isnan(column[count - 1]) else column[count - 1]

    def row(self, index: int) -> dict[str, float | None]:
        """Return the numbers of a row, the last one at -1; all None if there are no rows."""
        if not len(self):
            return dict.fromkeys(self.names)
        return {name: finite(column[index]) for name, column in self._columns.items()}

    def drop(self, name: str, above: float) -> None:
        """Remove the rows in which this column is larger."""
        kept = [index for index, value in enumerate(self._columns[name]) if not value > above]
        for key, column in self._columns.items():
            self._columns[key] = array("d", [column[index] for index in kept])


def number(value: object) -> float:
    """Return the value as a float; nan if it is no number, or larger than anything that a run counts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return float("nan")
    return float(value)


def finite(value: object) -> float | None:
    """Return the value as a float; None where `number` gives nan."""
    converted = number(value)
    return None if converted != converted else converted
