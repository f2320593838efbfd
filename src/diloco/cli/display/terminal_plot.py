"""The loss of a run as a small plot of characters: braille dots, or plain ASCII where the terminal shows no others."""

import math
import os
from collections.abc import Mapping
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from diloco.history.run_history import RunHistory
from diloco.plots.panels import Series
from diloco.plots.runs import PlottedRun, panels_of

_ROWS = 6
_NARROWEST = 40
_WIDEST = 100
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character: row, column
_VALIDATION = "bold magenta"
_BRAILLE = {"training": "⠒⠒", "point": "●", "side": "│", "tick": "┤", "corner": "└", "bottom": "─"}
_ASCII = {"training": "..", "point": "o", "side": "|", "tick": "+", "corner": "+", "bottom": "-"}


def loss_plot(history: RunHistory, console: Console) -> Text | None:
    """Draw the loss over steps in eight lines, with the validations as points; None if there are not two steps to
    draw."""
    run = PlottedRun("", history)
    if len({row.step for row in run.steps if not math.isnan(row.loss)}) < 2:
        return None
    drawn = {series.label: series for series in panels_of([run], ["steps"])[0].series}
    line = _points(drawn.get("training"))
    validation = _points(drawn.get("validation"))
    width = min(_WIDEST, console.width) - 9
    if width < _NARROWEST:
        return None
    return _draw(line, validation, width, plain=not _shows_braille(console, os.environ))


def _shows_braille(console: Console, environment: Mapping[str, str]) -> bool:
    """Return whether the terminal has braille letters: the Linux console and the oldest terminals have none, and some
    encodings cannot carry them."""
    if environment.get("TERM") in ("linux", "dumb", "vt100", "vt220") or console.legacy_windows:
        return False
    try:
        "⠒●│".encode(console.encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def _points(series: Series | None) -> list[tuple[float, float]]:
    if series is None:
        return []
    pairs = [(float(x), y) for x, y in zip(series.x, series.y, strict=True) if x is not None and y is not None]
    return [(x, y) for x, y in pairs if math.isfinite(y)]


def _draw(line: list[tuple[float, float]], validation: list[tuple[float, float]], width: int, *, plain: bool) -> Text:
    signs = _ASCII if plain else _BRAILLE
    losses = [loss for _, loss in [*line, *validation]]
    low = min(losses)
    high = max(losses)
    last = max(step for step, _ in [*line, *validation])
    axes = _Axes(last, low, high)
    cells = _cells(line, axes, width, plain=plain)
    points = {(axes.row(loss, _ROWS), axes.column(step, width)) for step, loss in validation}
    text = Text(no_wrap=True)
    for row in range(_ROWS):
        label = {0: f"{high:.4g}", _ROWS - 1: f"{low:.4g}"}.get(row, "")
        text.append(f"{label:>6} {signs['tick' if label else 'side']}")
        for column in range(width):
            is_point = (row, column) in points
            text.append(signs["point"] if is_point else cells.get((row, column), " "), _VALIDATION if is_point else "")
        text.append("\n")
    text.append(f"{'loss':>6} {signs['corner']}{signs['bottom'] * width}\n")
    text.append(f"{'':7} 0   {signs['training']} training")
    if validation:
        text.append("   ").append(signs["point"], _VALIDATION).append(" validation")
    used = len(text.plain.rsplit("\n", 1)[-1])
    return text.append(f" step {last:,.0f}".rjust(width + 8 - used))


def _cells(line: list[tuple[float, float]], axes: "_Axes", width: int, *, plain: bool) -> dict[tuple[int, int], str]:
    """Return the characters of the line by row and column: eight dots in each, or one."""
    across, down = (1, 1) if plain else (2, 4)
    bits: dict[tuple[int, int], int] = {}
    for column, row in _trace(line, axes, width * across, _ROWS * down):
        cell = (row // down, column // across)
        bits[cell] = bits.get(cell, 0) | _DOTS[row % down][column % across]
    return {cell: "." if plain else chr(0x2800 + dots) for cell, dots in bits.items()}


class _Axes:
    """Maps a step and a loss to a column from the left and a row from the top."""

    def __init__(self, last: float, low: float, high: float) -> None:
        self._last = max(last, 1.0)
        self._low = low
        self._range = (high - low) or 1.0

    def column(self, step: float, columns: int) -> int:
        return min(columns - 1, int(step / self._last * (columns - 1) + 0.5))

    def row(self, loss: float, rows: int) -> int:
        return rows - 1 - min(rows - 1, int((loss - self._low) / self._range * (rows - 1) + 0.5))


def _trace(line: list[tuple[float, float]], axes: _Axes, columns: int, rows: int) -> list[tuple[int, int]]:
    """Return the dots of a line, without gaps: the mean where several points are in a column, straight between
    columns."""
    sums: dict[int, list[float]] = {}
    for step, loss in line:
        sums.setdefault(axes.column(step, columns), []).append(loss)
    known = [(column, axes.row(sum(values) / len(values), rows)) for column, values in sorted(sums.items())]
    dots = known[:1]
    for (left, top), (right, bottom) in pairwise(known):
        before = top
        for column in range(left + 1, right + 1):
            row = round(top + (bottom - top) * (column - left) / (right - left))
            between = range(min(before, row) + (before < row), max(before, row) + (before <= row))
            dots += [(column, row_between) for row_between in between] or [(column, row)]
            dots.append((column, row))
            before = row
    return dots
