"""A line through the logarithms of perplexity: by which part it changes with each doubling of workers or of H."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from diloco.lab.experiment import Fit
from diloco.lab.report.summary import Summary


def fit_text(fit: Fit, summary: Summary) -> str | None:
    """The fitted line in words; None if the runs do not determine it."""
    points, losses = _points(fit, summary)
    if len(points) <= len(fit.names) + 1 or np.linalg.matrix_rank(points) < len(fit.names) + 1:
        return None
    line, *_ = np.linalg.lstsq(np.array(points), np.array(losses), rcond=None)
    left = np.array(losses) - np.array(points) @ line
    freedom = len(losses) - len(line)
    variance = float(left @ left) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(np.array(points).T @ np.array(points))))
    explained = 1 - float(left @ left) / (statistics.pvariance(losses) * len(losses))
    slopes = ", ".join(
        f"{math.expm1(slope):+.2%} ± {2 * error:.2%} with each doubling of {name}"
        for name, slope, error in zip(fit.names, line[1:], errors[1:], strict=True)
    )
    return (
        f"A line through the logarithms ({len(losses)} runs): perplexity changes by {slopes} (± two standard errors); "
        f"it explains {explained:.0%} of the variance."
    )


def _points(fit: Fit, summary: Summary) -> tuple[list[Sequence[float]], list[float]]:
    points, losses = list[Sequence[float]](), list[float]()
    for name, values in fit.places.items():
        arm = summary.arm(name)
        for result in arm.results if arm is not None else ():
            points.append((1.0, *(math.log2(value) for value in values)))
            losses.append(result.loss)
    return points, losses
