"""The figure of `diloco compare --plot`: losses over each other, and the last perplexity and bytes as bars."""

from collections.abc import Sequence

from diloco.cli.display.comparison import ComparedRun
from diloco.plots.panels import PALETTE, Panel, Series
from diloco.plots.plotted_run import read_run
from diloco.plots.runs import panels_of

_LOSSES = ("steps", "tokens", "bytes", "time")


def compared_panels(runs: Sequence[ComparedRun]) -> list[Panel]:
    panels = panels_of([read_run(run.folder, run.name) for run in runs], _LOSSES)
    bars = {"Validation perplexity": "validation_perplexity", "Bytes sent by a worker": "bytes_sent_per_worker"}
    for title, key in bars.items():
        series = [
            Series(run.name, [run.name], [run.summary[key]], color=PALETTE[number % len(PALETTE)])
            for number, run in enumerate(runs)
        ]
        panels.append(Panel(title, "", title.lower(), series, kind="bar"))
    return panels
