"""The curves of a run, few enough points to draw: every point has its step, tokens, bytes and seconds as x."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.history.columns import Columns, Numbers
from diloco.history.events import ROUND_STATISTICS
from diloco.history.figures import RunFigures, data_parallel_bytes
from diloco.history.members import GONE
from diloco.history.rounds import RoundHistory
from diloco.history.run_history import RunClock, RunHistory

Json = dict[str, Any]
MOST_POINTS = 4000
_SHOWN_WORKERS = 12
_RATE_POINTS = 240
_HELD_POINTS = 2  # for a worker of this machine: its workers log the same step a moment apart


def series(figures: RunFigures, points: int, own_curve_workers: set[int] | None = None) -> Json:
    """Return all curves of a run. All workers are in the means.

    `own_curve_workers`: the workers with a curve of their own; None: all, if they are few.
    """
    history = figures.history
    until = figures.until
    rows = {number: worker.columns.until(until) for number, worker in sorted(history.workers.items())}
    rows = {number: columns for number, columns in rows.items() if len(columns["time"])}
    axes = _Axes(rows, history.clock)
    logged = {number: _rows_of(columns, columns["logged"] > 0) for number, columns in rows.items()}
    began = {number: worker.began for number, worker in history.workers.items() if worker.local}
    if own_curve_workers is None:
        own_curve_workers = set(rows) if len(rows) <= _SHOWN_WORKERS else set()
    points_each = max(150, min(points, 2 * points // max(1, len(own_curve_workers))))
    return {
        "loss": _mean_curve(logged, "loss", points, axes),
        "gradient_norm": _mean_curve(logged, "gradient_norm", min(points, 400), axes),
        "learning_rate": _mean_curve(logged, "learning_rate", min(points, 200), axes),
        "start": history.clock.first,
        "workers": {
            str(n): _own_curve(columns, points_each, axes) for n, columns in logged.items() if n in own_curve_workers
        },
        "validation": _validation(history.validations, until, points, axes),
        "rates": _rates(rows, axes, own_curve_workers, began, _absences(history)),
        "rounds": _round_curves(figures.rounds, min(points, 600), axes),
        "statistics": [
            {"column": _column(name), "label": statistic.label, "meaning": statistic.meaning}
            for name, statistic in ROUND_STATISTICS.items()
        ],
        "communication": _communication(figures, rows, axes),
        "workers_in_means": len(rows),
    }


def _absences(history: RunHistory) -> dict[int, list[tuple[float, float]]]:
    """Return the times (from, to) at which each worker was absent: after its end if it is of this machine, and while it
    had left, was lost or excluded."""
    absences: dict[int, list[tuple[float, float]]] = {}
    for number, member in history.members.by_number.items():
        states = [*member.states, (np.inf, "", "")]
        absences[number] = [(start, end) for (start, state, _), (end, _, _) in pairwise(states) if state in GONE]
    for number, worker in history.workers.items():
        if worker.ended is not None:
            absences.setdefault(number, []).append((worker.ended.time, np.inf))
    return absences


def _rows_of(columns: dict[str, Numbers], kept: NDArray[np.bool_] | NDArray[np.int64]) -> dict[str, Numbers]:
    return {name: column[kept] for name, column in columns.items()}


class _Axes:
    """The x values that belong to a moment: the tokens of all workers, the bytes of the one that sent most, and the
    seconds that the run has taken, without pauses."""

    def __init__(self, rows: dict[int, dict[str, Numbers]], clock: RunClock) -> None:
        self._rows = list(rows.values())
        self._start = clock.first or 0.0
        pauses = sorted(clock.pauses)
        self._resumed = np.array([resumed_at for resumed_at, _ in pauses])
        self._paused = np.concatenate([[0.0], np.cumsum([seconds for _, seconds in pauses])])

    def seconds(self, times: Numbers) -> Numbers:
        """Return the seconds that the run had taken at each time, without the pauses before it."""
        paused: Numbers = self._paused[np.searchsorted(self._resumed, times, side="right")]
        return times - self._start - paused

    def times(self, seconds: Numbers) -> Numbers:
        """Return the times at which the run had taken so many seconds: the inverse of `seconds`."""
        resumed = self.seconds(self._resumed)
        paused: Numbers = self._paused[np.searchsorted(resumed, seconds, side="right")]
        return seconds + self._start + paused

    def between(self, times: Numbers) -> Json:
        """Return the x values of moments between logged ones. Counters are interpolated, so that no two moments have
        the same x."""

        def reached(name: str, after_last: float | None = None) -> list[Numbers]:
            """Interpolate a counter of each worker. `after_last`: the value after its last growth (default: the last
            value)."""
            rows_of_growth = [_rows_of(row, _grown(row[name])) for row in self._rows]
            return [
                np.interp(times, row["time"], row[name], 0.0, after_last) for row in rows_of_growth if len(row["time"])
            ]

        nothing = np.zeros(len(times))
        return {
            "step": exact_json(np.max([nothing, *reached("step")], axis=0)),
            "tokens": exact_json(np.sum([nothing, *reached("tokens")], axis=0)),
            "bytes": exact_json(np.fmax.reduce(reached("bytes_sent", np.nan) or [nothing])),  # until the last round
            "seconds": exact_json(self.seconds(times)),
        }

    def at(self, times: Numbers, steps: Numbers | None = None) -> Json:
        """Return the x values of logged moments. `steps`: default, the largest step that a worker had logged."""
        tokens = sum((_held(row, "tokens", times) for row in self._rows), np.zeros(len(times)))
        bytes_sent = np.zeros(len(times))
        for row in self._rows:
            bytes_sent = np.maximum(bytes_sent, _held(row, "bytes_sent", times))
        if steps is None:
            steps = np.zeros(len(times))
            for row in self._rows:
                steps = np.maximum(steps, _held(row, "step", times))
        seconds = exact_json(self.seconds(times))
        return {
            "step": exact_json(steps),
            "tokens": exact_json(tokens),
            "bytes": exact_json(bytes_sent),
            "seconds": seconds,
        }


def _grown(values: Numbers) -> NDArray[np.bool_]:
    """Return where a counter is above all its values before."""
    numbers = np.nan_to_num(values, nan=-1.0)
    return numbers > np.concatenate([[-1.0], np.maximum.accumulate(numbers)[:-1]])


def _held(row: dict[str, Numbers], name: str, times: Numbers) -> Numbers:
    """Return the last value of a column by each time; 0 before the first."""
    indices = np.searchsorted(row["time"], times, side="right")
    return np.concatenate([[0.0], np.nan_to_num(row[name])])[indices]


def _mean_curve(rows: dict[int, dict[str, Numbers]], name: str, points: int, axes: _Axes) -> Json:
    if not rows:
        return {"step": [], "tokens": [], "bytes": [], "seconds": [], "mean": [], "low": [], "high": []}
    steps = np.concatenate([row["step"] for row in rows.values()])
    values = np.concatenate([row[name] for row in rows.values()])
    times = np.concatenate([row["time"] for row in rows.values()])
    known = ~np.isnan(steps)
    curve = mean_by_step(steps[known], values[known], points)
    last = mean_by_step(steps[known], times[known], points)["high"]
    values_json = {key: as_json(curve[key]) for key in ("mean", "low", "high")}
    return axes.at(last, curve["step"]) | values_json


def _own_curve(row: dict[str, Numbers], points: int, axes: _Axes) -> Json:
    """Return a worker's loss, with a gap before each of its starts but the first."""
    row = _rows_of(row, thin_out(row["loss"], points))
    starts = np.flatnonzero(np.diff(row["start"])) + 1
    times, steps = (np.insert(row[name], starts, row[name][starts]) for name in ("time", "step"))
    return axes.at(times, steps) | {"loss": as_json(np.insert(row["loss"], starts, np.nan))}


def _validation(columns: Columns, until: float | None, points: int, axes: _Axes) -> Json:
    values = columns.until(until)
    kept = thin_out(values["loss"], points)
    x = axes.at(values["measured"][kept], values["step"][kept])
    return x | {"loss": as_json(values["loss"][kept]), "perplexity": as_json(values["perplexity"][kept])}


def _rates(
    rows: dict[int, dict[str, Numbers]],
    axes: _Axes,
    own_curve_workers: set[int],
    began: dict[int, list[float]],
    absences: dict[int, list[tuple[float, float]]],
) -> Json:
    """Return tokens per second, and the share of the time that was not spent on rounds, between consecutive moments.

    `began`: when each worker of this machine began to train, at its starts. A worker's own curve begins with the first
    step that it logged and ends with the last; one elsewhere counts in the sum with its last rate until it is gone,
    since its reports come late. There is no sum while the rate of a worker here is not known, as after a resume: it
    would be that of a part of the workers.
    """
    pieces = {number: _pieces(row, axes) for number, row in rows.items()}
    pieces = {number: worker_pieces for number, worker_pieces in pieces.items() if worker_pieces}
    if not pieces:
        empty: Json = {"tokens_per_second": [], "utilization": [], "utilization_low": [], "utilization_high": []}
        return axes.at(np.zeros(0)) | empty | {"workers": {}}
    first = min(worker_pieces[0]["seconds"][0] for worker_pieces in pieces.values())
    last = max(worker_pieces[-1]["seconds"][-1] for worker_pieces in pieces.values())
    logged = max(sum(len(piece["seconds"]) for piece in worker_pieces) for worker_pieces in pieces.values())
    grid = np.linspace(first, last, min(_RATE_POINTS, max(2, logged)) + 1)
    total = np.full(len(grid) - 1, np.nan)
    partial = np.zeros(len(grid) - 1, dtype=bool)
    shares = []
    own_curves = {}
    for number, worker_pieces in pieces.items():
        rate, share = _rate_and_share(worker_pieces, grid)
        shares.append(share)
        if number in own_curve_workers:
            own_curves[str(number)] = {"tokens_per_second": as_json(rate), "utilization": as_json(share)}
        absent = np.zeros(len(rate), dtype=bool)
        for start, end in axes.seconds(np.array(absences.get(number, []))):
            absent |= (grid[1:] > start) & (grid[1:] <= end)
        rate = _held_rate(rate, absent, _HELD_POINTS if number in began else len(rate))
        total = np.where(np.isnan(rate), total, np.nan_to_num(total) + rate)
        if began.get(number):
            partial |= np.isnan(rate) & ~absent & (grid[1:] > axes.seconds(np.array(began[number][:1])))
    all_shares = np.array(shares)
    counts = (~np.isnan(all_shares)).sum(axis=0)
    mean = np.where(counts > 0, np.nansum(all_shares, axis=0) / np.maximum(counts, 1), np.nan)
    return axes.between(axes.times(grid[1:])) | {
        "tokens_per_second": as_json(np.where(partial, np.nan, total)),
        "utilization": as_json(mean),
        "utilization_low": as_json(_extreme(all_shares, np.fmin)),
        "utilization_high": as_json(_extreme(all_shares, np.fmax)),
        "workers": own_curves,
    }


def _pieces(row: dict[str, Numbers], axes: _Axes) -> list[dict[str, Numbers]]:
    """Return the logged steps of a worker, for each of its starts that has two or more. Its counters grow between
    them."""
    row = row | {"seconds": axes.seconds(row["time"])}
    row = _rows_of(row, (row["logged"] > 0) & ~np.isnan(row["elapsed_seconds"]) & ~np.isnan(row["tokens"]))
    pieces = []
    for start in np.unique(row["start"]):
        piece = _rows_of(row, row["start"] == start)
        piece = _rows_of(piece, _grown(piece["elapsed_seconds"]))
        if len(piece["seconds"]) > 1:
            pieces.append(piece)
    return pieces


def _rate_and_share(pieces: list[dict[str, Numbers]], grid: Numbers) -> tuple[Numbers, Numbers]:
    """Return rate and share between the moments of the grid; nan where nothing was logged."""
    rate = np.full(len(grid) - 1, np.nan)
    share = np.full(len(grid) - 1, np.nan)
    for piece in pieces:
        seconds = piece["seconds"]
        ran = np.diff(np.interp(grid, seconds, piece["elapsed_seconds"]))
        gained = np.maximum(np.diff(np.interp(grid, seconds, piece["tokens"])), 0.0)
        synced = np.maximum(np.diff(np.interp(grid, seconds, np.nan_to_num(piece["sync_seconds"]))), 0.0)
        running = ran > 0
        rate[running] = gained[running] / ran[running]
        share[running] = np.clip((ran[running] - synced[running]) / ran[running], 0.0, 1.0)
    return rate, share


def _held_rate(rate: Numbers, absent: NDArray[np.bool_], longest: int) -> Numbers:
    """Fill unknown rates with the last known one, for up to `longest` moments after it. They stay unknown before the
    first one, and from an absence to the next one."""
    moments = np.arange(len(rate))
    last_known = np.maximum.accumulate(np.where(np.isnan(rate) & ~absent, -1, moments))
    is_held = (last_known >= 0) & (moments - last_known <= longest)
    return np.where(is_held, rate[np.maximum(last_known, 0)], np.nan)


def _extreme(shares: Numbers, extreme: np.ufunc) -> Numbers:
    """Return the smallest or largest share of a worker at each moment; nan if none was running."""
    return np.asarray(extreme.reduce(shares, axis=0))


def _round_curves(rounds: list[RoundHistory], points: int, axes: _Axes) -> Json:
    merged = [round_ for round_ in rounds if round_.merged]
    columns = {
        _column(name): np.array([_or_nan(round_.statistics[name]) for round_ in merged]) for name in ROUND_STATISTICS
    }
    columns["sequence"] = np.array([float(round_.sequence) for round_ in merged])
    columns["contributors"] = np.array([float(len(round_.contributors)) for round_ in merged])
    norms = [
        [worker_round.norm for worker_round in round_.workers.values() if worker_round.norm is not None]
        for round_ in merged
    ]
    columns["norm_low"] = np.array([min(round_norms, default=np.nan) for round_norms in norms])
    columns["norm_high"] = np.array([max(round_norms, default=np.nan) for round_norms in norms])
    columns["cosine_low"] = np.array([_or_nan(round_.cosine_low) for round_ in merged])
    columns["cosine_high"] = np.array([_or_nan(round_.cosine_high) for round_ in merged])
    kept = thin_out(columns["mean_norm"], points)
    x = axes.at(
        np.array([round_.time for round_ in merged])[kept], np.array([float(round_.step) for round_ in merged])[kept]
    )
    return x | {name: as_json(column[kept]) for name, column in columns.items()}


def _column(statistic: str) -> str:
    """Return the name of a statistic among the curves of the rounds, in which `seconds` is where a round is in time."""
    return "round_seconds" if statistic == "seconds" else statistic


def _communication(figures: RunFigures, rows: dict[int, dict[str, Numbers]], axes: _Axes) -> Json:
    """Bytes that a worker has sent, and what it would have sent with a gradient average at every step."""
    history = figures.history
    if not rows or not history.tokens_per_step:
        return axes.at(np.zeros(0)) | {"sent": [], "data_parallel": []}
    row = max(rows.values(), key=lambda columns: float(np.nan_to_num(columns["tokens"][-1])))
    kept = thin_out(row["bytes_sent"], 300)
    steps = row["tokens"][kept] / history.tokens_per_step
    baseline = data_parallel_bytes(history.trainable_parameters, 1, figures.usual_workers) * steps
    x = axes.at(row["time"][kept], row["step"][kept])
    return x | {"sent": as_json(row["bytes_sent"][kept]), "data_parallel": as_json(baseline)}


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


# Few points that keep every extreme


def thin_out(values: Numbers, points: int) -> NDArray[np.int64]:
    """Choose at most `points` rows, by index: of each bucket of rows the smallest and the largest value and the first
    nan, and the first and last row of all."""
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
    """Return mean, smallest and largest value of all workers' rows at each step, or in each of `points` ranges of steps
    if there are more steps. Values that are nan are left out; a range without any other is nan."""
    distinct = np.unique(steps)
    edges = distinct
    if len(distinct) > points:  # the last one is always there
        edges = distinct[np.linspace(len(distinct) - 1, 0, points).astype(int)[::-1]]
    edge_of_row = np.searchsorted(edges, steps)  # the first edge that is not below the step
    finite = ~np.isnan(values)
    counts = np.bincount(edge_of_row[finite], minlength=len(edges))[: len(edges)]
    sums = np.bincount(edge_of_row[finite], weights=values[finite], minlength=len(edges))[: len(edges)]
    low, high = np.full(len(edges), np.inf), np.full(len(edges), -np.inf)
    np.minimum.at(low, edge_of_row[finite], values[finite])
    np.maximum.at(high, edge_of_row[finite], values[finite])
    empty = counts == 0
    mean = np.where(empty, np.nan, sums / np.maximum(counts, 1))
    return {
        "step": edges,
        "mean": mean,
        "low": np.where(empty, np.nan, low),
        "high": np.where(empty, np.nan, high),
    }


def as_json(values: Sequence[float] | Numbers) -> list[float | None]:
    """Round to six digits; null where there is no number."""
    return [None if not np.isfinite(value) else float(f"{value:.6g}") for value in values]


def exact_json(values: Sequence[float] | Numbers) -> list[float | None]:
    """Keep steps and times as they are, to a thousandth; null where there is no number."""
    return [None if not np.isfinite(value) else round(float(value), 3) for value in values]
