"""The figures of a report as panels (plots/panels.py)."""

import math

from diloco.lab.experiment import Curves, Figure, Similarity, Sweep
from diloco.lab.report.summary import ArmSummary, Summary
from diloco.plots.panels import Panel, Series

_PERPLEXITY = "validation perplexity"


def panel_of(figure: Figure, summary: Summary) -> Panel | None:
    """None if no arm of it has been run."""
    if isinstance(figure, Sweep):
        return _sweep(figure, summary)
    arms = [arm for arm in summary.arms if not figure.arms or arm.name in figure.arms]
    if figure.arms:
        arms.sort(key=lambda arm: figure.arms.index(arm.name))
    if not arms:
        return None
    return _curves(figure, arms) if isinstance(figure, Curves) else _similarity(figure, arms)


def _curves(figure: Curves, arms: list[ArmSummary]) -> Panel:
    """Of the second half on a scale of its own one would see more: the first tenth is left out."""
    series = []
    for arm in arms:
        points = arm.curve()
        begins = arm.results[0].arm.pretraining_steps
        multiplier = arm.results[0].arm.updates_multiplier
        last = points[-1][0]
        shown = [point for point in points if point[0] >= 0.1 * last]
        x = [begins + step / multiplier for step, *_ in shown]
        series.append(
            Series(arm.name, x, [m for _, m, _, _ in shown], [a for *_, a, _ in shown], [b for *_, b in shown])
        )
    return Panel(figure.title or "The curves", "step, pre-training included", _PERPLEXITY, series)


def _similarity(figure: Similarity, arms: list[ArmSummary]) -> Panel:
    series = []
    for arm in arms:
        rows = arm.similarity()
        mean, spread = [c for _, c, _ in rows], [s for *_, s in rows]
        low = [c - s for c, s in zip(mean, spread, strict=True)]
        high = [c + s for c, s in zip(mean, spread, strict=True)]
        series.append(Series(arm.name, [step for step, *_ in rows], mean, low, high))
    return Panel(figure.title, "step after pre-training", "cosine of outer gradients", series)


def _sweep(figure: Sweep, summary: Summary) -> Panel | None:
    reference = summary.arms[0] if summary.arms else None
    series = []
    for line, places in figure.lines.items():
        arms = [(x, arm) for name, x in places.items() if (arm := summary.arm(name)) is not None]
        arms.sort(key=lambda one: one[0])
        if not arms or reference is None:
            continue
        points = [_change(arm, reference) if figure.relative else _perplexities(arm) for _, arm in arms]
        middle = [point[0] for point in points]
        low = [point[1] for point in points]
        high = [point[2] for point in points]
        series.append(Series(line, [x for x, _ in arms], middle, low, high, marker="o"))
    if not series or reference is None:
        return None
    label = f"against {reference.name}, %" if figure.relative else _PERPLEXITY
    ticks = sorted({float(x) for one in series for x in one.x if x is not None})
    return Panel(figure.title, figure.x_label, label, series, x_log=figure.x_log, x_ticks=ticks)


def _change(arm: ArmSummary, reference: ArmSummary) -> tuple[float, float, float]:
    """The change of perplexity in per cent, and the ends of its 95 % interval."""
    mean, half = arm.change_against(reference)
    half = 0.0 if math.isinf(half) else half
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def _perplexities(arm: ArmSummary) -> tuple[float, float, float]:
    values = [one.perplexity for one in arm.results]
    return arm.perplexity, min(values), max(values)
