"""Draws one panel on its axes, and the legends of a figure. Imports matplotlib: only `figures.py` imports this."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from diloco.plots.panels import PALETTE, Panel, Series, Values, one_line

Dashes = Literal["solid", "dashed", "dotted", "dashdot", "none"]
_DASHES: tuple[Dashes, ...] = ("solid", "dashed", "dotted", "dashdot")
_MOST_NAMES = 16  # in a legend
_LONG_NAME = 40


@dataclass(frozen=True)
class Look:
    """The colour of a label, and the dashes that tell it from another label of that colour."""

    color: str
    dashes: Dashes


def looks_of(panels: Sequence[Panel]) -> dict[str, Look]:
    """Return the look of each label: the first one that no other label has which is in a panel with it."""
    every = [Look(color, dashes) for dashes in _DASHES for color in PALETTE]
    beside: dict[str, set[str]] = {}
    for panel in panels:
        labels = {series.label for series in panel.series}
        for label in labels:
            beside.setdefault(label, set()).update(labels)
    looks: dict[str, Look] = {}
    for number, series in enumerate(series for panel in panels for series in panel.series):
        if series.label not in looks:
            taken = {looks[other] for other in beside[series.label] if other in looks}
            free = (look for look in every if look not in taken)
            own = None if series.color is None else Look(series.color, "solid")
            looks[series.label] = own or next(free, every[number % len(every)])
    return looks


def draw_panel(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    axes.set_title(one_line(panel.title))
    axes.set_xlabel(one_line(panel.x_label))
    axes.set_ylabel(one_line(panel.y_label))
    {"line": _draw_lines, "scatter": _draw_lines, "bar": _draw_bars, "spans": _draw_spans}[panel.kind](
        axes, panel, looks
    )
    if not axes.has_data() or not any(map(_has_values, panel.series)):
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#888888")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if panel.kind in ("line", "scatter"):
        axes.margins(x=0.02)
        _number_axis(axes.xaxis, panel.x_log)
        if panel.x_ticks:
            axes.set_xticks(panel.x_ticks, [shown_number(tick) for tick in panel.x_ticks])
            axes.xaxis.set_minor_locator(NullLocator())
    if panel.kind == "spans":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown_number(value)))
        axes.grid(axis="x")
    else:
        _number_axis(axes.yaxis, panel.y_log)
        axes.grid(axis="y")


def _has_values(series: Series) -> bool:
    return bool(np.isfinite(_numbers(series.y)).any())


def _numbers(values: Values, above_zero: bool = False) -> np.ndarray:
    """Return the values, with nan for gaps and for what a logarithmic axis cannot show."""
    numbers = np.array([math.nan if value is None else float(value) for value in values], dtype=float)
    numbers[~np.isfinite(numbers)] = math.nan
    if above_zero:
        numbers[numbers <= 0] = math.nan
    return numbers


def _draw_lines(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    for series in panel.series:
        look = looks[series.label]
        x = _numbers(series.x, panel.x_log)  # type: ignore[arg-type]  # names are for bars
        y = _numbers(series.y, panel.y_log)
        points = panel.kind == "scatter" or series.line == "none"
        if series.low is not None and series.high is not None:
            low = _numbers(series.low, panel.y_log)
            high = _numbers(series.high, panel.y_log)
            if points:
                axes.errorbar(x, y, [y - low, high - y], fmt="none", ecolor=look.color, elinewidth=0.8, capsize=2)
            else:
                axes.fill_between(x, low, high, color=look.color, alpha=0.18, linewidth=0)
        lone = int(np.isfinite(y).sum()) == 1  # a line of one point would not be seen
        axes.plot(
            x,
            y,
            color=look.color,
            linestyle="none" if points else _dashes(series, look),
            marker=_marker(series, panel, lone),
            linewidth=0.7 if series.faint else None,
            alpha=0.3 if series.faint else None,
            zorder=1.5 if series.faint else 2.5,
        )


def _dashes(series: Series, look: Look) -> Dashes:
    return look.dashes if series.line == "solid" else series.line


def _marker(series: Series, panel: Panel, lone: bool) -> str | None:
    return series.marker or ("o" if panel.kind == "scatter" or series.line == "none" or lone else None)


def _draw_bars(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    """Draw bars grouped by name, with the series of a group beside each other."""
    if panel.y_log:
        axes.set_yscale("log")
    groups = _groups(panel)
    names = list(groups)
    most = max(map(len, groups.values()), default=1)
    width = 0.8 / most if most > 1 else 0.6
    for number, series in enumerate(panel.series):
        within = [(groups[str(name)].index(number), len(groups[str(name)])) for name in series.x]
        shifts = [(position - (count - 1) / 2) * width for position, count in within]
        x = [names.index(str(name)) + shift for name, shift in zip(series.x, shifts, strict=True)]
        y = _numbers(series.y, panel.y_log)
        errors = None
        if series.low is not None and series.high is not None:
            errors = [np.nan_to_num(y - _numbers(series.low)), np.nan_to_num(_numbers(series.high) - y)]
        style = {"elinewidth": 0.8, "capsize": 2, "ecolor": "#222222"}
        axes.bar(x, y, width * 0.92, color=looks[series.label].color, yerr=errors, error_kw=style)
    long = sum(map(len, names)) > 36
    axes.set_xticks(range(len(names)), [one_line(name) for name in names])
    if long:
        axes.tick_params(axis="x", labelrotation=30)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    axes.tick_params(axis="x", length=0)


def _groups(panel: Panel) -> dict[str, list[int]]:
    """Return the names below the bars, and which series have a bar there."""
    groups: dict[str, list[int]] = {}
    for number, series in enumerate(panel.series):
        for name in dict.fromkeys(map(str, series.x)):
            groups.setdefault(name, []).append(number)
    return groups


def _draw_spans(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    """Draw a row of coloured bars for each name in `rows`, the first at the top."""
    for series in panel.series:
        start = _numbers(series.x)  # type: ignore[arg-type]
        end = _numbers(series.until or ())
        row = _numbers(series.y)
        known = np.isfinite(start) & np.isfinite(end) & np.isfinite(row)
        axes.barh(
            row[known], (end - start)[known], 0.72, left=start[known], color=looks[series.label].color, linewidth=0
        )
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.set_yticks(range(len(panel.rows)), [one_line(name) for name in panel.rows])
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.01)


def _number_axis(axis: Axis, logarithmic: bool) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown_number(value)))
    if not logarithmic:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        return
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 1.0
    if decades < 0.7:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=8))
    axis.set_minor_formatter(NullFormatter())


def add_legends(figure: Figure, axes: Sequence[Axes], panels: Sequence[Panel], looks: dict[str, Look]) -> None:
    """Add one legend below the figure if all panels show the same things, else one below each panel: never over the
    data."""
    entries = [_entries(panel) for panel in panels]
    named = [names for names in entries if names]
    if len(panels) > 1 and len(named) > 1 and all(names.keys() == named[0].keys() for names in named[1:]):
        first = entries.index(named[0])
        if len(named[0]) > 1:
            handles = _handles(panels[first], named[0], looks)
            figure.legend(handles=handles, loc="outside lower center", ncols=_columns(named[0], 2 * 62))
        return
    for own_axes, panel, names in zip(axes, panels, entries, strict=True):
        if len(names) > 1:
            below = own_axes.transAxes + ScaledTranslation(0, -0.42, figure.dpi_scale_trans)
            columns = _columns(names, 62)
            own_axes.legend(
                handles=_handles(panel, names, looks),
                loc="upper center",
                bbox_to_anchor=(0.5, 0.0),
                bbox_transform=below,
                ncols=columns,
                borderaxespad=0.0,
            )


def _entries(panel: Panel) -> dict[str, Series]:
    """Return the series of a legend by their label; none for single bars, which have their names below them."""
    if panel.kind == "bar" and all(len(series) == 1 for series in _groups(panel).values()):
        return {}
    return {series.label: series for series in reversed(panel.series) if not series.faint and series.label}


def _columns(names: dict[str, Series], characters: int) -> int:
    longest = min(_LONG_NAME, max(map(len, names))) + 8  # its line and the space before the next one
    most = max(1, min(len(names), characters // longest))
    return next((count for count in range(most, 1, -1) if len(names) % count == 0), most)


def _handles(panel: Panel, names: dict[str, Series], looks: dict[str, Look]) -> list[Line2D | Patch]:
    ordered = list(reversed(names.values()))
    handles: list[Line2D | Patch] = []
    for series in ordered[:_MOST_NAMES]:
        look = looks[series.label]
        label = one_line(series.label, _LONG_NAME)
        if label.startswith("_"):
            label = " " + label  # matplotlib leaves out what begins with an underscore
        if panel.kind in ("bar", "spans"):
            handles.append(Patch(color=look.color, label=label, linewidth=0))
            continue
        points = panel.kind == "scatter" or series.line == "none"
        dashes: Dashes = "none" if points else _dashes(series, look)
        handles.append(
            Line2D([], [], color=look.color, linestyle=dashes, marker=_marker(series, panel, False), label=label)
        )
    if len(ordered) > _MOST_NAMES:
        handles.append(Line2D([], [], linestyle="none", label=f"and {len(ordered) - _MOST_NAMES} more"))
    return handles


def shown_number(value: float) -> str:
    """Return the number as on an axis: 0.25, 1500, 20k, 1.5M, 3G."""
    if not math.isfinite(value):
        return ""
    size = abs(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit and (unit != 1e3 or size >= 1e4):
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"
