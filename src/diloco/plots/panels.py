"""What a figure shows: panels of series. Plain data, without matplotlib; `figures.py` draws it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#882255")
"""Okabe and Ito's colours, told apart with every kind of colour vision; without yellow, which is pale on white."""
Values = Sequence[float | None]
"""Numbers; None, nan and inf are gaps."""


@dataclass(frozen=True)
class Series:
    """One line, one set of points, or one set of bars. A label has the same colour in every panel of a figure."""

    label: str
    x: Values | Sequence[str]
    """Names in a panel of bars; in a panel of spans, where each begins."""
    y: Values
    """The values; in a panel of spans the row of each: a position in the panel's `rows`."""
    low: Values | None = None
    high: Values | None = None
    """The upper end of a band around a line that begins at `low`, or of error bars on points and bars."""
    until: Values | None = None
    """The end of each span in a panel of spans."""
    color: str | None = None
    """Instead of the next one of the palette: any colour that matplotlib knows."""
    line: Literal["solid", "dashed", "dotted", "none"] = "solid"
    marker: Literal["", "o", "s", "^", "x", "D"] = ""
    faint: bool = False
    """Behind the others and out of the legend: the raw values behind a smoothed line, say."""


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    kind: Literal["line", "bar", "scatter", "spans"] = "line"
    rows: Sequence[str] = field(default=())
    """The names of the rows of spans, from the top."""
    x_ticks: Sequence[float] = ()
    """Where the x axis has its ticks, such as at the values that were measured (default: at round numbers)."""


def one_line(text: str, longest: int = 120) -> str:
    """Return the text on one line, without control characters; a long text keeps its beginning and its end."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(text) > longest:
        half = (longest - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return text
