"""`diloco lab report`: one HTML page that needs nothing else, and a Markdown file with its figures beside it.

report.html              tables, verdicts, figures inside
report.md, figures/*.svg the same for a repository
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import final

from diloco.atomic_files import write_file
from diloco.errors import ConfigError, install_hint
from diloco.lab.claims import FEWEST_SEEDS, Judgement, correct
from diloco.lab.experiment import Experiment
from diloco.lab.experiments import t2
from diloco.lab.report.pages import Block, Drawing, Grid, Heading, Text, as_html, as_markdown
from diloco.lab.report.panels import panel_of
from diloco.lab.report.summary import ArmSummary, Summary, Window, regime_check, summarise, window_of
from diloco.lab.results import ResultFolder, Setting
from diloco.lab.scales import Scale, scale_of
from diloco.plots.figures import as_svg, check_installed, draw

PAPER = (
    "The paper trains 60M to 400M parameters on web text: 24,000 pre-training steps and 64,000 more, batches of "
    "512 × 1,024 tokens for each worker, H = 500, 128 rounds."
)


@final
@dataclass(frozen=True)
class Report:
    """The paths of what was written, and the verdicts."""

    html: Path
    markdown: Path
    judgements: tuple[Judgement, ...]


def write_report(folder: Path, experiments: Sequence[Experiment], to: Path | None = None) -> Report:
    """The report of a folder of `diloco lab run`; `to`: another folder for it."""
    check_installed("lab")
    if find_spec("scipy") is None:
        raise ConfigError(f"a report needs the package scipy, for its tests: {install_hint('lab')}")
    results = ResultFolder(folder)
    setting, target = results.setting(), to or folder
    scale = scale_of(setting.scale)
    summaries = [
        summarise(one, scale, results, setting.texts[one.text]) for one in experiments if one.text in setting.texts
    ]
    summaries = _corrected([one for one in summaries if one.arms])
    if not summaries:
        raise ConfigError(f"{folder} has no finished arm of these experiments: diloco lab run … --out {folder}")
    digest = setting.texts.get(t2.EXPERIMENT.text)
    baselines = None if digest is None else summarise(t2.EXPERIMENT, scale, results, digest)
    blocks = _head(setting, scale, summaries, regime_check(baselines))
    for summary in summaries:
        blocks += _section(summary, scale, window_of(baselines))
    target.mkdir(parents=True, exist_ok=True)
    title = f"The laboratory's report, scale {scale.name}"
    html, markdown = target / "report.html", target / "report.md"
    write_file(html, as_html(title, blocks).encode())
    for block in blocks:
        if isinstance(block, Drawing):
            path = target / block.path
            path.parent.mkdir(exist_ok=True)
            write_file(path, block.svg.encode())
    write_file(markdown, as_markdown(title, blocks).encode())
    return Report(html, markdown, tuple(one for summary in summaries for one in summary.judgements))


def _corrected(summaries: Sequence[Summary]) -> list[Summary]:
    """The same summaries, their verdicts corrected for the number of claims in the whole report."""
    judgements = iter(correct([one for summary in summaries for one in summary.judgements]))
    return [replace(summary, judgements=tuple(next(judgements) for _ in summary.judgements)) for summary in summaries]


def _head(setting: Setting, scale: Scale, summaries: list[Summary], regime: str) -> list[Block]:
    finished = [one for summary in summaries for arm in summary.arms for one in arm.by_seed.values()]
    machines = sorted({f"{one.result.machine['device']}, torch {one.result.machine['torch']}" for one in finished})
    codes = sorted({one.code for one in finished})
    texts = "; ".join(words if role == "text" else f"{role}: {words}" for role, words in setting.described.items())
    counts = [
        (
            verdict,
            sum(one.verdict == verdict and bool(one.values) for summary in summaries for one in summary.judgements),
        )
        for verdict in ("holds", "does not hold", "not resolved")
    ]
    smoke = " This is a smoke test: its numbers mean nothing." if scale.smoke else ""
    tuned = "" if scale.tuned else " The rates of this scale have not been tuned (diloco lab tune regime)."
    return [
        Text(
            f"Here: {scale.described()}.{smoke}{tuned} Text: {texts}. Machine: {'; '.join(machines)}. "
            f"Code: {', '.join(codes)}."
        ),
        Heading(2, "The regime, and how the scale differs from the paper's"),
        Text(PAPER + " Perplexities of different texts and vocabularies cannot be compared: compare changes."),
        Text(regime),
        Heading(2, "Verdicts"),
        Text(
            "; ".join(f"{count} {verdict}" for verdict, count in counts)
            + f". A verdict needs {FEWEST_SEEDS} seeds: it "
            "compares the 95 % interval over the seeds of the difference between arms with the same beginning and "
            "batches (lab/claims.py), and stands only after Benjamini and Hochberg's correction over all claims. Sign "
            "and size compare the interval with the published number. ± in this table is half of that interval; in the "
            'tables of arms it is the standard deviation over the seeds. "Window kept" is 0 at the loss of one worker '
            "alone and 100 % at that of data parallelism with the same steps (t2)."
        ),
        _verdicts(summaries),
    ]


def _verdicts(summaries: Sequence[Summary]) -> Grid:
    rows = [
        (f"**{one.experiment.name}**", *_judgement_row(judgement)) for one in summaries for judgement in one.judgements
    ]
    return Grid(("", *_JUDGEMENT_HEADS), rows)


_JUDGEMENT_HEADS = ("claim", "published", "measured", "sign", "size", "asked", "seeds", "verdict")


def _judgement_row(one: Judgement) -> tuple[str, ...]:
    return (
        one.claim.text,
        one.claim.published,
        one.measured_text,
        one.sign_text,
        one.size_text,
        one.claim.range_text,
        str(len(one.values)),
        one.verdict_text,
    )


def _section(summary: Summary, scale: Scale, window: Window | None) -> list[Block]:
    experiment = summary.experiment
    blocks: list[Block] = [
        Heading(2, f"{experiment.name}: {experiment.title}"),
        Text(f"{experiment.source}. {experiment.note}"),
    ]
    if summary.missing:
        blocks.append(Text(f"Not run: {', '.join(summary.missing)}."))
    blocks.append(_table(summary, window if experiment.text == t2.EXPERIMENT.text else None))
    if experiment.analysis is not None:
        blocks += experiment.analysis(scale, {arm.name: arm.results for arm in summary.arms})
    panels = [panel for figure in experiment.figures(scale) if (panel := panel_of(figure, summary)) is not None]
    if panels:
        blocks.append(Drawing(experiment.title, f"figures/{experiment.name}.svg", as_svg(draw(panels))))
    if summary.judgements:
        blocks.append(Grid(_JUDGEMENT_HEADS, [*map(_judgement_row, summary.judgements)]))
    return blocks


def _table(summary: Summary, window: Window | None) -> Grid:
    published = summary.experiment.published
    reference = summary.arms[0]
    rows = []
    for arm in sorted(summary.arms, key=lambda one: one.perplexity):
        result = arm.results[0]
        rows.append(
            (
                arm.name,
                _with_spread(arm),
                "" if arm is reference else f"{arm.perplexity / reference.perplexity - 1:+.2%}",
                "" if window is None else f"{window.share_kept(arm):.0%}",
                f"{published[arm.name]:.2f}" if arm.name in published else "",
                f"{result.tokens / 1e6:.1f}",
                f"{result.bytes_sent_per_worker / 1e6:,.1f}" if result.arm.workers > 1 else "0",
                f"{result.simulated_seconds:,.0f}",
                f"{result.utilisation:.0%}",
                str(len(arm.by_seed)),
            )
        )
    link = reference.results[0].arm
    clock = f"s at {link.bits_per_second / 1e9:g} Gbit/s, {link.step_seconds:g} s a step"
    heads = (
        "arm",
        "perplexity",
        f"against {reference.name}",
        "window kept",
        "published",
        "M tokens",
        "MB sent a worker",
        clock,
    )
    return Grid((*heads, "utilisation", "seeds"), rows)


def _with_spread(arm: ArmSummary) -> str:
    spread = arm.spread
    return f"{arm.perplexity:.2f}" if spread is None else f"{arm.perplexity:.2f} ± {spread:.2f}"
