"""The figures of a report as panels (plots/panels.py)."""

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
    series = []
    for line, places in figure.lines.items():
        arms = [(x, arm) for name, x in places.items() if (arm := summary.arm(name)) is not None]
        arms.sort(key=lambda one: one[0])
        if arms:
            values = [[one.perplexity for one in arm.results] for _, arm in arms]
            x, y = [x for x, _ in arms], [arm.perplexity for _, arm in arms]
            low, high = [min(one) for one in values], [max(one) for one in values]
            series.append(Series(line, x, y, low, high, marker="o"))
    if not series:
        return None
    return Panel(figure.title, figure.x_label, _PERPLEXITY, series, x_log=figure.x_log)
