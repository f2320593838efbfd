"""Fits through the results of many arms: lines through logarithms, power laws, and how well they predict.

A fit says how wrong it is: two standard errors of each number, the part of the variance that it explains, and, where
the arms allow it, its error at arms that it has not seen.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from diloco.lab.arm import ArmResult
from diloco.lab.report.pages import Block, Paragraph

Results = Mapping[str, Sequence[ArmResult]]
"""The finished runs of each arm, by its name; an arm that has not been run is not there."""
Values = NDArray[np.float64]


def doubling_line(names: Sequence[str], places: Mapping[str, tuple[float, ...]], results: Results) -> list[Block]:
    """Fit log perplexity by a line in the logarithms of some numbers, and say how it changes with each doubling.

    `names` are those of the numbers, such as H; `places` gives the numbers of each arm. Nothing is said if the results
    do not determine the line.
    """
    points = list[Sequence[float]]()
    losses = list[float]()
    for arm, values in places.items():
        for result in results.get(arm, ()):
            points.append((1.0, *(math.log2(value) for value in values)))
            losses.append(result.loss)
    if len(points) <= len(names) + 1 or np.linalg.matrix_rank(points) < len(names) + 1:
        return []
    line, *_ = np.linalg.lstsq(np.array(points), np.array(losses), rcond=None)
    residuals = np.array(losses) - np.array(points) @ line
    freedom = len(losses) - len(line)
    variance = float(residuals @ residuals) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(np.array(points).T @ np.array(points))))
    explained = 1 - float(residuals @ residuals) / (statistics.pvariance(losses) * len(losses))
    slopes = ", ".join(
        f"{math.expm1(slope):+.2%} ± {2 * error:.2%} with each doubling of {name}"
        for name, slope, error in zip(names, line[1:], errors[1:], strict=True)
    )
    return [
        Paragraph(
            f"A line through the logarithms ({len(losses)} runs): perplexity changes by {slopes} (± two standard "
            f"errors); it explains {explained:.0%} of the variance."
        )
    ]


@final
@dataclass(frozen=True)
class PowerLaw:
    """y = a · Π x_i^(b_i), fitted to y itself, not to its logarithm, so that values around 0 count as what they are."""

    factor: float
    exponents: tuple[float, ...]
    errors: tuple[float, ...]
    """Two standard errors of the factor and of each exponent."""
    error: float
    """The root mean square of what is left."""
    explained: float
    """The part of the variance that it explains."""

    def predict(self, places: Sequence[Sequence[float]]) -> Values:
        return _power_law(np.array(places, float).T, self.factor, *self.exponents)


def _power_law(places: Values, factor: float, *exponents: float) -> Values:
    logarithms = np.log(places)
    predicted: Values = factor * np.exp(sum(b * x for b, x in zip(exponents, logarithms, strict=True)))
    return predicted


def fit_power_law(places: Sequence[Sequence[float]], values: Sequence[float]) -> PowerLaw | None:
    """Fit the law through points (x_1, x_2, …) → y; None if the points do not determine it."""
    from scipy.optimize import curve_fit

    x = np.array(places, float).T
    y = np.array(values, float)
    if len(values) <= len(x) + 1 or np.linalg.matrix_rank(np.vstack([np.ones(len(y)), np.log(x)])) < len(x) + 1:
        return None
    start = (float(np.abs(y).mean()) or 1e-3, *([0.5] * len(x)))
    try:
        fitted, covariance = curve_fit(_power_law, x, y, p0=start, maxfev=20_000)
    except RuntimeError:  # it does not converge
        return None
    residuals = y - _power_law(x, *fitted)
    total = float(((y - y.mean()) ** 2).sum())
    return PowerLaw(
        factor=float(fitted[0]),
        exponents=tuple(float(exponent) for exponent in fitted[1:]),
        errors=tuple(float(2 * error) for error in np.sqrt(np.diag(covariance))),
        error=float(np.sqrt((residuals**2).mean())),
        explained=1 - float((residuals**2).sum()) / total if total else 1.0,
    )


def lowest_of_parabola(x: Sequence[float], y: Sequence[float]) -> float:
    """Return where y would be lowest, by a parabola through the three points around the lowest; never outside them."""
    order = np.argsort(x)
    xs, ys = np.array(x, float)[order], np.array(y, float)[order]
    lowest = int(ys.argmin())
    if lowest in (0, len(xs) - 1):
        return float(xs[lowest])
    around = slice(lowest - 1, lowest + 2)
    curvature, slope, _ = np.polyfit(xs[around], ys[around], 2)
    return float(np.clip(-slope / (2 * curvature), xs[lowest - 1], xs[lowest + 1]))


def left_out_errors(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Predict each point by the line through all others, and by their mean. Returns the root mean squares of the two
    errors."""
    by_line = []
    by_mean = []
    for index in range(len(x)):
        others_x = [value for index_of_other, value in enumerate(x) if index_of_other != index]
        others_y = [value for index_of_other, value in enumerate(y) if index_of_other != index]
        predict = _line(others_x, others_y)
        by_line.append(y[index] - predict(x[index]))
        by_mean.append(y[index] - statistics.mean(others_y))
    return _root_mean_square(by_line), _root_mean_square(by_mean)


def _line(x: Sequence[float], y: Sequence[float]) -> Callable[[float], float]:
    if len(set(x)) < 2:
        mean = statistics.mean(y)
        return lambda _: mean
    slope, intercept = np.polyfit(x, y, 1)
    return lambda value: float(slope * value + intercept)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.mean(value * value for value in values))
