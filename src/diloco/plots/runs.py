"""The panels of training runs, from their histories; several runs are drawn over each other."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diloco.errors import ConfigError
from diloco.history.events import EVENTS_VERSION, ROUND_STATISTICS
from diloco.history.log import EVENTS_FILE
from diloco.history.rounds import RoundHistory
from diloco.history.run_history import LiveHistory, RunHistory
from diloco.history.waterfall import PHASES, PhaseSpan
from diloco.plots.panels import PALETTE, Panel, Series, Values

_MOST_POINTS = 2000
_FAR_APART = 8
"""The bytes of runs that differ by more than this factor are on a logarithmic axis."""
_SPAN_COLORS = {
    "compute": "#0072B2",
    "encode": "#56B4E9",
    "send": "#009E73",
    "wait": "#c8c8c8",
    "reduce": "#E69F00",
    "merge": "#CC79A7",
    "failed round": "#D55E00",
}


class LoggedStep(NamedTuple):
    """A logged step of a worker, or its end, which has no loss; nan where a number is not known."""

    step: int
    loss: float
    tokens: float
    bytes_sent: float
    elapsed_seconds: float
    sync_seconds: float


@dataclass(frozen=True)
class PlottedRun:
    """A run with its name in the figure."""

    name: str
    history: RunHistory

    @cached_property
    def steps(self) -> list[LoggedStep]:
        """The logged steps of this machine's workers, and the end of a worker as a step without a loss."""
        rows: list[LoggedStep] = []
        for worker in self.history.local_workers.values():
            columns = worker.columns.until(None)
            logged = columns["logged"] > 0
            values = [columns[name][logged] for name in LoggedStep._fields]
            rows += [LoggedStep(int(step), *map(float, rest)) for step, *rest in zip(*values, strict=True)]
        last = max((row.step for row in rows), default=0)
        for worker in self.history.local_workers.values():
            if worker.ended is not None and worker.ended.inner_steps > last:
                now = worker.progress
                counters = (now.tokens, now.bytes_sent, now.elapsed_seconds, now.sync_seconds)
                rows.append(LoggedStep(worker.ended.inner_steps, math.nan, *counters))
        return rows

    @cached_property
    def validations(self) -> dict[int, float]:
        """Validation losses by step; in a swarm every worker tells the same."""
        values = self.history.validations.until(None)
        return {int(step): float(loss) for step, loss in zip(values["step"], values["loss"], strict=True)}

    @cached_property
    def rounds(self) -> list[RoundHistory]:
        """The rounds with a mean or a failure: a last round, in which no worker had work, has neither."""
        return self.history.rounds.until(None)


def read_run(folder: Path, name: str) -> PlottedRun:
    """Read the history of a run folder; raise ConfigError for a folder that is no run, or has nothing to plot."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    if not (folder / EVENTS_FILE).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {EVENTS_FILE}")
    live = LiveHistory(folder)
    live.refresh()
    newest = live.reader.newest_version
    if newest > EVENTS_VERSION:
        raise ConfigError(
            f"{folder} was written by a newer version of diloco (events of version {newest}, this one reads "
            f"{EVENTS_VERSION}): update diloco"
        )
    run = PlottedRun(name, live.history)
    if not any(not math.isnan(row.elapsed_seconds) for row in run.steps):
        raise ConfigError(f"{folder} has no steps yet: there is nothing to plot before the first one is logged")
    return run


# What a figure can show


def panels_of(
    runs: Sequence[PlottedRun], names: Sequence[str] | None = None, *, smooth: int = 1, rounds: int = 6
) -> list[Panel]:
    """Return the panels with these names of PANELS; None: all that these runs have something for.

    `smooth`: the mean of so many logged steps. `rounds`: how many of the last ones a waterfall shows.
    """
    for name in names or ():
        if name not in PANELS:
            raise ConfigError(f"there is no panel {name!r}: choose of {', '.join(PANELS)}")
        if name in _PANELS_OF_ROUNDS and not any(run.rounds for run in runs):
            which = ", ".join(run.name for run in runs)
            raise ConfigError(
                f"the panel {name!r} shows rounds, and {which} has none yet (a data-parallel run has none)"
            )
    request = _Request(runs, smooth, rounds)
    drawn = [PANELS[name](request) for name in (PANELS if names is None else names)]
    return [panel for several in drawn for panel in several if names is not None or panel.series]


@dataclass(frozen=True)
class _Request:
    """The runs to draw, and the options of `diloco plot` that panels follow."""

    runs: Sequence[PlottedRun]
    smooth: int
    rounds: int

    def colors(self) -> Iterable[tuple[PlottedRun, str]]:
        return ((run, PALETTE[place % len(PALETTE)]) for place, run in enumerate(self.runs))


def _loss_over(
    name: str, label: str, x_of: Callable[[LoggedStep], float], total: Callable[[Sequence[float]], float]
) -> Callable[[_Request], list[Panel]]:
    """Return what makes the panel of the mean loss of the workers over something that grows with the steps; `total` is
    of the workers' values."""

    def panel(request: _Request) -> list[Panel]:
        series = []
        is_single = len(request.runs) == 1
        for run, color in request.colors():
            rows = _by_step(run.steps, lambda row: (x_of(row), row.loss))
            steps = list(rows)
            x = [total([value for value, _ in row]) for row in rows.values()]
            losses = [[loss for _, loss in row] for row in rows.values()]
            name_of_line = "training" if is_single else run.name
            series += _lines(name_of_line, x, losses, color, request.smooth)
            points = [
                (place, loss)
                for step, loss in run.validations.items()
                if (place := _between(step, steps, x, name != "bytes")) is not None
            ]
            if points:
                name_of_points = "validation" if is_single else f"{run.name}, validation"
                validated_at, validation_losses = zip(*points, strict=True)
                dots = Series(name_of_points, validated_at, validation_losses, color=_darker(color), line="dashed")
                series.append(replace(dots, marker=_marker(points)))
        reached = [[x for x in curve.x if isinstance(x, int | float) and x > 0] for curve in series]
        ends = [max(values) for values in reached if values]
        far_apart = name == "bytes" and bool(ends) and max(ends) > _FAR_APART * min(ends)
        return [Panel(f"Loss over {name}", label, "loss", series, x_log=far_apart)]

    return panel


def _between(step: int, steps: Sequence[int], x: Sequence[float], even: bool) -> float | None:
    """Return the x of a step, from the logged steps beside it; None beyond the last.

    `even`: x grows evenly between them; else it is what had been reached at the later one.
    """
    after = bisect_left(steps, step)
    if after == len(steps) or steps[after] == step:
        return x[after] if after < len(steps) else None
    if not even:
        return x[after] if step else 0.0
    step_before = steps[after - 1] if after else 0
    x_before = x[after - 1] if after else 0.0
    return x_before + (x[after] - x_before) * (step - step_before) / (steps[after] - step_before)


def _by_step(logged: Iterable[LoggedStep], value: Callable[[LoggedStep], Any]) -> dict[int, list[Any]]:
    """Return the values of all workers at each step, in the order of steps."""
    rows: dict[int, list[Any]] = {}
    for row in logged:
        rows.setdefault(row.step, []).append(value(row))
    return dict(sorted(rows.items()))


def _rounds_by_step(rounds: Iterable[RoundHistory]) -> dict[int, list[RoundHistory]]:
    """Return the rounds at each step, in the order of steps: with fragments there may be several."""
    rows: dict[int, list[RoundHistory]] = {}
    for round_ in rounds:
        rows.setdefault(round_.step, []).append(round_)
    return dict(sorted(rows.items()))


def _lines(
    label: str, x: Sequence[float], values: Sequence[Sequence[float]], color: str, smooth: int = 1, **how: Any
) -> list[Series]:
    """Return a line through the means, in a band from the smallest to the largest of the workers; smoothed if asked."""
    rows = [[value for value in row if math.isfinite(value)] for row in values]
    means = [statistics.fmean(row) if row else None for row in rows]
    low = [min(row, default=None) for row in rows]
    high = [max(row, default=None) for row in rows]
    return _band(label, x, means, low, high, color, smooth, several=any(len(row) > 1 for row in rows), **how)


def _band(
    label: str,
    x: Sequence[float],
    means: Values,
    low: Values,
    high: Values,
    color: str,
    smooth: int = 1,
    *,
    several: bool,
    **how: Any,
) -> list[Series]:
    """Return a line through `means` in a band from `low` to `high`; `several`: there was more than one value at a
    place."""
    several = several or len(means) > _MOST_POINTS
    x, means, low, high = _thinned(x, means, low, high)
    if smooth <= 1:
        return [Series(label, x, means, low if several else None, high if several else None, color=color, **how)]
    return [
        Series(label, x, means, color=color, faint=True),
        Series(label, x, _smoothed(means, smooth), color=color, **how),
    ]


def _thinned(x: Sequence[float], mean: Values, low: Values, high: Values) -> tuple[list[float], Values, Values, Values]:
    """Return at most _MOST_POINTS, each for some neighbours: their mean, smallest and largest value."""
    every = -(-len(x) // _MOST_POINTS)
    if every <= 1:
        return list(x), mean, low, high
    groups = [slice(first, first + every) for first in range(0, len(x), every)]

    def each(values: Values, what: Callable[[list[float]], float]) -> list[float | None]:
        rows = [[value for value in values[group] if value is not None] for group in groups]
        return [what(row) if row else None for row in rows]

    return [x[group][-1] for group in groups], each(mean, statistics.fmean), each(low, min), each(high, max)


def _smoothed(values: Values, count: int) -> list[float | None]:
    """Return the mean of the last `count` values; a gap stays a gap."""
    smoothed: list[float | None] = []
    window: list[float] = []
    for value in values:
        if value is None:
            smoothed.append(None)
            continue
        window = [*window, value][-count:]
        smoothed.append(statistics.fmean(window))
    return smoothed


def _marker(points: Sized) -> Literal["o", ""]:
    """Return a dot for points that do not touch each other; many points are a line."""
    return "o" if len(points) <= 40 else ""


def _darker(color: str) -> str:
    """Return a darker colour, for the points of the validation beside the line of the training loss."""
    return "#" + "".join(f"{int(int(color[at : at + 2], 16) * 0.55):02x}" for at in (1, 3, 5))


def _seconds(request: _Request) -> list[Panel]:
    times = [row.elapsed_seconds for run in request.runs for row in run.steps]
    longest = max((seconds for seconds in times if math.isfinite(seconds)), default=0.0)
    unit = 1.0
    name = "seconds"
    if longest > 3 * 3600:
        unit = 3600.0
        name = "hours"
    elif longest > 300:
        unit = 60.0
        name = "minutes"
    return _loss_over("time", f"{name} of training", lambda row: row.elapsed_seconds / unit, max)(request)


def _utilization(request: _Request) -> list[Panel]:
    def share(row: LoggedStep) -> float:
        return 100 * (1 - row.sync_seconds / row.elapsed_seconds) if row.elapsed_seconds > 0 else math.nan

    series: list[Series] = []
    for run, color in request.colors():
        rows = _by_step(run.steps, share)
        series += _lines(run.name, list(rows), list(rows.values()), color)
    return [Panel("Compute utilisation", "inner step", "% of time, without rounds", series)]


def _cosines(request: _Request) -> list[Panel]:
    series: list[Series] = []
    for run, color in request.colors():
        compared = [round_ for round_ in run.rounds if round_.pairs]
        first = {step: rounds[0] for step, rounds in _rounds_by_step(compared).items()}
        if first:
            rounds = list(first.values())
            series += _band(
                run.name,
                list(first),
                [round_.statistics["similarity"] for round_ in rounds],
                [round_.cosine_low for round_ in rounds],
                [round_.cosine_high for round_ in rounds],
                color,
                several=any(round_.pairs > 1 for round_ in rounds),
                marker=_marker(first),
            )
    return [Panel("Cosine of the workers' outer gradients", "inner step", "cosine, all pairs", series)]


def _norms(request: _Request) -> list[Panel]:
    series: list[Series] = []
    alone = len(request.runs) == 1
    for run, color in request.colors():
        rows = _rounds_by_step(run.rounds)
        if not rows:
            continue
        own = [[norm for round_ in rounds for norm in _norms_here(round_)] for rounds in rows.values()]
        series += _lines("of a worker" if alone else run.name, list(rows), own, color)
        means = [
            [norm for round_ in rounds if (norm := round_.statistics["mean_norm"]) is not None]
            for rounds in rows.values()
        ]
        averages = [statistics.fmean(norms) if norms else None for norms in means]
        label = "of the mean" if alone else f"{run.name}, mean"
        series.append(Series(label, list(rows), averages, color=_darker(color), line="dashed"))
    return [Panel("Norm of the outer gradients", "inner step", "norm", series)]


def _statistics(request: _Request) -> list[Panel]:
    """Return a panel for each statistic of the rounds that has none of its own."""
    return [
        Panel(statistic.meaning, "inner step", statistic.unit, _statistic_lines(request, name))
        for name, statistic in ROUND_STATISTICS.items()
        if name not in _STATISTICS_IN_OTHER_PANELS
    ]


def _statistic_lines(request: _Request, name: str) -> list[Series]:
    series: list[Series] = []
    for run, color in request.colors():
        rows = _rounds_by_step(round_ for round_ in run.rounds if round_.statistics[name] is not None)
        values = [[_or_nan(round_.statistics[name]) for round_ in rounds] for rounds in rows.values()]
        if rows:
            series += _lines(run.name, list(rows), values, color)
    return series


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _norms_here(round_: RoundHistory) -> list[float]:
    """Return the norms of this machine's workers, which have told the end of the round."""
    parts = [part for part in round_.workers.values() if not part.elsewhere and part.ended is not None]
    return [math.nan if part.norm is None else part.norm for part in parts]


def _waterfalls(request: _Request) -> list[Panel]:
    """Return a panel for each run: what its workers did in the last rounds."""
    panels = []
    for run in request.runs:
        if not run.rounds:
            continue
        last = [round_.sequence for round_ in run.rounds][-request.rounds :]
        spans = [span for span in run.history.spans() if span.sequence in last]
        if not spans:
            continue
        start = min(span.start for span in spans)
        workers = sorted({span.worker for span in spans})
        series = [
            _span_series(phase, [s for s in spans if s.phase == phase and not s.failed], workers, start)
            for phase in PHASES
        ]
        series.append(_span_series("failed round", [span for span in spans if span.failed], workers, start))
        series = [row for row in series if row.x]
        title = f"Rounds {last[0]} to {last[-1]}" if len(last) > 1 else f"Round {last[0]}"
        if len(request.runs) > 1:
            title = f"{title} of {run.name}"
        panels.append(
            Panel(title, "seconds", "", series, kind="spans", rows=[f"worker {worker}" for worker in workers])
        )
    return panels


def _span_series(label: str, spans: Sequence[PhaseSpan], workers: Sequence[int], start: float) -> Series:
    rows = [float(workers.index(span.worker)) for span in spans]
    begins = [span.start - start for span in spans]
    ends = [span.end - start for span in spans]
    return Series(label, begins, rows, until=ends, color=_SPAN_COLORS[label])


PANELS: dict[str, Callable[[_Request], list[Panel]]] = {
    "steps": _loss_over("steps", "inner step", lambda row: float(row.step), max),
    "tokens": _loss_over("tokens", "tokens of these workers", lambda row: row.tokens, sum),
    "bytes": _loss_over("bytes", "bytes sent by a worker", lambda row: row.bytes_sent, max),
    "time": _seconds,
    "rounds": _waterfalls,
    "utilisation": _utilization,
    "cosines": _cosines,
    "norms": _norms,
    "statistics": _statistics,
}
"""The makers of panels by name, in the order of a figure with all of them."""
_PANELS_OF_ROUNDS = ("rounds", "cosines", "norms", "statistics")
_STATISTICS_IN_OTHER_PANELS = ("similarity", "mean_norm")
