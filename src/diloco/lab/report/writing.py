"""`diloco lab report`: one HTML page that needs nothing else, and a Markdown file with its figures beside it.

report.html              tables, verdicts, figures inside
report.md, figures/*.svg the same for a repository
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import final

from diloco.atomic_files import write_file
from diloco.errors import ConfigError, install_hint
from diloco.lab.claims import FEWEST_SEEDS, Judgement, correct, distinct, half_width
from diloco.lab.experiment import Curves, Experiment, Figure, Similarity, Sweep
from diloco.lab.experiments import t2
from diloco.lab.report.pages import Block, Drawing, Grid, Heading, Paragraph, as_html, as_markdown
from diloco.lab.report.summary import ArmSummary, Summary, Window, regime_check, summarise, windows_of
from diloco.lab.results import TUNING_SEED, ResultFolder, Setting
from diloco.lab.scales import Scale, scale_of
from diloco.plots.figures import as_svg, check_installed, draw
from diloco.plots.panels import Panel, Series

PAPER = (
    "The paper trains 60M to 400M parameters on web text: 24,000 pre-training steps and 64,000 more, batches of "
    "512 × 1,024 tokens for each worker, H = 500, 128 rounds."
)


@final
@dataclass(frozen=True)
class WrittenReport:
    """The paths of what was written, and the verdicts."""

    html: Path
    markdown: Path
    judgements: tuple[Judgement, ...]


def write_report(folder: Path, experiments: Sequence[Experiment], to: Path | None = None) -> WrittenReport:
    """Write the report of a folder of `diloco lab run`, into that folder or into `to`."""
    check_installed("lab")
    if find_spec("scipy") is None:
        raise ConfigError(f"a report needs the package scipy, for its tests: {install_hint('lab')}")
    results = ResultFolder(folder)
    setting = results.setting()
    target = to or folder
    scale = scale_of(setting.scale)
    summaries = [
        summarise(experiment, scale, results, setting.texts[experiment.text])
        for experiment in experiments
        if experiment.text in setting.texts
    ]
    summaries, too_few_arms = _split_off_incomplete(summaries)
    if not summaries:
        raise ConfigError(f"{folder} has no finished arm of these experiments: diloco lab run … --out {folder}")
    digest = setting.texts.get(t2.EXPERIMENT.text)
    baselines = None if digest is None else summarise(t2.EXPERIMENT, scale, results, digest)
    blocks = _head(setting, scale, summaries, regime_check(baselines))
    if too_few_arms:
        blocks.append(Paragraph(f"Experiments without two finished arms: {', '.join(too_few_arms)}."))
    for summary in summaries:
        blocks += _section(summary, scale, windows_of(baselines))
    blocks += _tuning(results)
    target.mkdir(parents=True, exist_ok=True)
    title = f"The laboratory's report, scale {scale.name}"
    html = target / "report.html"
    markdown = target / "report.md"
    write_file(html, as_html(title, blocks).encode())
    for block in blocks:
        if isinstance(block, Drawing):
            path = target / block.path
            path.parent.mkdir(exist_ok=True)
            write_file(path, block.svg.encode())
    write_file(markdown, as_markdown(title, blocks).encode())
    return WrittenReport(html, markdown, tuple(judgement for summary in summaries for judgement in summary.judgements))


def _split_off_incomplete(summaries: Sequence[Summary]) -> tuple[list[Summary], list[str]]:
    """Return the experiments with arms to compare, their verdicts corrected; and the names of the others.

    An experiment that has one arm only needs no second one.
    """
    compared = [summary for summary in summaries if len(summary.arms) > 1 or (summary.arms and not summary.missing)]
    return _corrected(compared), [summary.experiment.name for summary in summaries if summary not in compared]


def _corrected(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries with their verdicts corrected for the number of claims in the whole report."""
    judgements = iter(correct([judgement for summary in summaries for judgement in summary.judgements]))
    return [replace(summary, judgements=tuple(next(judgements) for _ in summary.judgements)) for summary in summaries]


def _head(setting: Setting, scale: Scale, summaries: list[Summary], regime_text: str) -> list[Block]:
    finished = [run for summary in summaries for arm in summary.arms for run in arm.by_seed.values()]
    machines = sorted({f"{run.result.machine['device']}, torch {run.result.machine['torch']}" for run in finished})
    codes = sorted({run.code for run in finished})
    dates = sorted({run.date[:10] for run in finished if run.date})
    texts = "; ".join(words if role == "text" else f"{role}: {words}" for role, words in setting.described.items())
    claims = distinct([judgement for summary in summaries for judgement in summary.judgements])
    counts = [
        (
            verdict,
            sum(judgement.verdict == verdict and bool(judgement.values) for judgement in claims),
        )
        for verdict in ("holds", "does not hold", "not resolved")
    ]
    smoke = " This is a smoke test: its numbers mean nothing." if scale.smoke else ""
    tuned = "" if scale.tuned else " The rates of this scale have not been tuned (diloco lab tune regime)."
    return [
        Paragraph(
            f"Here: {scale.described()}.{smoke}{tuned} Text: {texts}. Machine: {'; '.join(machines)}. "
            f"Code: {', '.join(codes)}. Dates: {', '.join(dates)}."
        ),
        Heading(2, "The regime, and how the scale differs from the paper's"),
        Paragraph(PAPER + " Perplexities of different texts and vocabularies cannot be compared: compare changes."),
        Paragraph(regime_text),
        Heading(2, "Verdicts"),
        Paragraph(
            "; ".join(f"{count} {verdict}" for verdict, count in counts)
            + f". A verdict needs {FEWEST_SEEDS} seeds: it "
            "compares the 95 % interval over the seeds of the difference between arms with the same beginning and "
            "batches (lab/claims.py), and stands only after Benjamini and Hochberg's correction over all claims. Sign "
            "and size compare the interval with the published number. ± in this table is half of that interval; in the "
            "tables of arms it is the standard deviation over the seeds, and of a change or a share again half of the "
            "interval, seed by seed. A perplexity is the mean over the seeds that all arms of its table have, or over "
            'the arm\'s own if they share none. "Gain kept" is 0 at the loss of one worker alone and 100 % at that of '
            'DiLoCo as tuned (t2); "window kept" has data parallelism with the same steps at 100 %.'
        ),
        _verdicts(summaries),
        *_without_runs(summaries),
    ]


def _verdicts(summaries: Sequence[Summary]) -> Grid:
    """Make the table of all claims. One that an earlier experiment asks of the same arms is not repeated."""
    judged = [
        (summary.experiment.name, judgement)
        for summary in summaries
        for judgement in summary.judgements
        if judgement.values
    ]
    first = {id(kept) for kept in distinct([judgement for _, judgement in judged])}
    rows = [(f"**{name}**", *_judgement_row(judgement)) for name, judgement in judged if id(judgement) in first]
    return Grid(("", *_JUDGEMENT_HEADS), rows)


def _without_runs(summaries: Sequence[Summary]) -> list[Block]:
    """List the experiments with claims that no seed can judge, because an arm has not been run."""
    counts = {
        summary.experiment.name: sum(not judgement.values for judgement in summary.judgements) for summary in summaries
    }
    named = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    return [Paragraph(f"Claims without a run of all their arms: {named}.")] if named else []


def _tuning(results: ResultFolder) -> list[Block]:
    """Show what every search tried, the best first, and whether its walk was finished."""
    rows = []
    for name, search in results.searches().items():
        places_text = "; ".join(_describe_place(place) for place in search.tried)
        unmeasured = search.unmeasured_neighbours
        remarks = [f"{unmeasured} neighbours of the best not measured"] if unmeasured else []
        if any(search.tried[0][name] != value for name, value in search.chosen.items()):
            remarks.append(f"the runs have {_describe_values(search.chosen)}")
        remarks += [f"{edge} ends its ladder" for edge in search.at_the_end_of_its_ladder]
        rows.append((name, places_text, "; ".join(remarks) or "no better neighbour"))
    if not rows:
        return []
    return [
        Heading(2, "Tuning"),
        Paragraph(
            f"Validation loss on seed {TUNING_SEED}, which judges nothing; the best is first. Two searches may go on "
            "from different beginnings of that seed: only losses of one search can be compared."
        ),
        Grid(("search", "tried: loss", "how it ended"), rows),
    ]


def _describe_place(place: Mapping[str, float]) -> str:
    values = {name: value for name, value in place.items() if name != "loss"}
    return f"{_describe_values(values)}: {place['loss']:.4f}"


def _describe_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


_JUDGEMENT_HEADS = ("claim", "published", "measured", "sign", "size", "asked", "seeds", "verdict")


def _judgement_row(judgement: Judgement) -> tuple[str, ...]:
    return (
        judgement.claim.text,
        judgement.claim.published,
        judgement.measured_text,
        judgement.sign_text,
        judgement.size_text,
        judgement.claim.range_text,
        str(len(judgement.values)),
        judgement.verdict_text,
    )


def _section(summary: Summary, scale: Scale, windows: Mapping[str, Window]) -> list[Block]:
    experiment = summary.experiment
    blocks: list[Block] = [
        Heading(2, f"{experiment.name}: {experiment.title}"),
        Paragraph(f"{experiment.source}. {experiment.note}"),
    ]
    if summary.missing:
        blocks.append(Paragraph(f"Not run: {', '.join(summary.missing)}."))
    shown = summary.at_common_seeds()
    blocks.append(_table(summary, shown, windows if experiment.text == t2.EXPERIMENT.text else {}))
    if experiment.analysis is not None:
        blocks += experiment.analysis(scale, {arm.name: arm.results for arm in shown.arms})
    panels = [panel for figure in experiment.figures(scale) if (panel := panel_of(figure, shown)) is not None]
    if panels:
        blocks.append(Drawing(experiment.title, f"figures/{experiment.name}.svg", as_svg(draw(panels))))
    if judged := [judgement for judgement in summary.judgements if judgement.values]:
        blocks.append(Grid(_JUDGEMENT_HEADS, [*map(_judgement_row, judged)]))
    return blocks


def _table(summary: Summary, shown: Summary, windows: Mapping[str, Window]) -> Grid:
    """Make the table of an experiment's arms. `shown` has the seeds whose perplexities are compared."""
    published = summary.experiment.published
    reference = summary.arms[0]
    rows = []
    pairs = zip(summary.arms, shown.arms, strict=True)
    for arm, compared in sorted(pairs, key=lambda pair: pair[1].perplexity):
        result = arm.results[0]
        rows.append(
            (
                arm.name,
                _with_spread(compared),
                "" if arm is reference else _with_interval(*arm.change_against(reference)),
                *(_share(window.shares_kept(arm)) for window in windows.values()),
                f"{published[arm.name]:.2f}" if arm.name in published else "",
                f"{result.tokens / 1e6:.1f}",
                f"{result.bytes_sent_per_worker / 1e6:,.1f}" if result.arm.workers > 1 else "0",
                f"{result.simulated_seconds:,.0f}",
                f"{result.utilisation:.0%}",
                _seeds_text(arm),
            )
        )
    link = reference.results[0].arm
    clock = f"s at {link.bits_per_second / 1e9:g} Gbit/s, {link.step_seconds:g} s a step"
    heads = (
        "arm",
        "perplexity",
        f"against {reference.name}",
        *windows,
        "published",
        "M tokens",
        "MB sent a worker",
        clock,
    )
    return Grid((*heads, "utilisation", "seeds"), rows)


def _seeds_text(arm: ArmSummary) -> str:
    """Write the seeds of an arm, as a range if there is no gap: 0–2."""
    seeds = sorted(arm.by_seed)
    whole = len(seeds) > 1 and seeds == [*range(seeds[0], seeds[-1] + 1)]
    return f"{seeds[0]}–{seeds[-1]}" if whole else ", ".join(map(str, seeds))


def _with_interval(mean: float, half: float) -> str:
    return f"{mean:+.2%}" if math.isinf(half) else f"{mean:+.2%} ± {half:.2%}"


def _share(values: Sequence[float]) -> str:
    """Write the mean and half of the 95 % interval over the seeds."""
    if not values:
        return ""
    half = half_width(values)
    mean = f"{statistics.mean(values):.0%}"
    return mean if math.isinf(half) else f"{mean} ± {half:.0%}".replace("% ±", " ±")


def _with_spread(arm: ArmSummary) -> str:
    spread = arm.spread
    return f"{arm.perplexity:.2f}" if spread is None else f"{arm.perplexity:.2f} ± {spread:.2f}"


# The figures, as panels (plots/panels.py)


_PERPLEXITY = "validation perplexity"


def panel_of(figure: Figure, summary: Summary) -> Panel | None:
    """Make the panel of a figure; None if none of its arms has been run."""
    if isinstance(figure, Sweep):
        return _sweep(figure, summary)
    arms = [arm for arm in summary.arms if not figure.arms or arm.name in figure.arms]
    if figure.arms:
        arms.sort(key=lambda arm: figure.arms.index(arm.name))
    if not arms:
        return None
    return _curves(figure, arms) if isinstance(figure, Curves) else _similarity(figure, arms)


def _curves(figure: Curves, arms: list[ArmSummary]) -> Panel:
    """Draw the perplexity over the steps, without the first tenth, whose height would flatten the rest."""
    series = []
    for arm in arms:
        points = arm.curve()
        pretraining_steps = arm.results[0].arm.pretraining_steps
        multiplier = arm.results[0].arm.updates_multiplier
        last = points[-1][0]
        later_points = [point for point in points if point[0] >= 0.1 * last]
        x = [pretraining_steps + step / multiplier for step, *_ in later_points]
        series.append(
            Series(
                arm.name,
                x,
                [m for _, m, _, _ in later_points],
                [a for *_, a, _ in later_points],
                [b for *_, b in later_points],
            )
        )
    return Panel(figure.title, "step, pre-training included", _PERPLEXITY, series)


def _similarity(figure: Similarity, arms: list[ArmSummary]) -> Panel:
    series = []
    for arm in arms:
        points = arm.similarity()
        mean = [c for _, c, _ in points]
        spread = [s for *_, s in points]
        low = [c - s for c, s in zip(mean, spread, strict=True)]
        high = [c + s for c, s in zip(mean, spread, strict=True)]
        series.append(Series(arm.name, [step for step, *_ in points], mean, low, high))
    return Panel(figure.title, "step after pre-training", "cosine of outer gradients", series)


def _sweep(figure: Sweep, summary: Summary) -> Panel | None:
    reference = summary.arms[0] if summary.arms else None
    series = []
    for line, places in figure.lines.items():
        arms = [(x, arm) for name, x in places.items() if (arm := summary.arm(name)) is not None]
        arms.sort(key=lambda pair: pair[0])
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
    ticks = sorted({float(x) for curve in series for x in curve.x if x is not None})
    return Panel(figure.title, figure.x_label, label, series, x_log=figure.x_log, x_ticks=ticks)


def _change(arm: ArmSummary, reference: ArmSummary) -> tuple[float, float, float]:
    """Return the change of perplexity in per cent, and the ends of its 95 % interval."""
    mean, half = arm.change_against(reference)
    half = 0.0 if math.isinf(half) else half
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def _perplexities(arm: ArmSummary) -> tuple[float, float, float]:
    values = [result.perplexity for result in arm.results]
    return arm.perplexity, min(values), max(values)
