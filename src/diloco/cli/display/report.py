"""The end of a run on one screen."""

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diloco.cli.display.numbers import duration, megabytes, share, times
from diloco.cli.display.terminal_plot import loss_plot
from diloco.history.events import ROUND_STATISTICS
from diloco.history.notes import printable
from diloco.history.run_history import read_history
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.records.run_folder import resume_command
from diloco.training.records.summary import Summary


def print_report(console: Console, folder: Path, summary: Summary) -> None:
    """Print the results of a run that has ended."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(Panel(table, title=f"diloco · {summary['status']}", title_align="left", expand=False))
    history = read_history(folder)
    plot = loss_plot(history, console)
    if plot is not None:
        console.print(plot)
    sample = history.latest_start.sample  # an earlier one may have written another
    if sample is not None:
        text = Text.assemble((printable(sample.prompt), "bold"), printable(sample.text))
        console.print(Panel(text, title="a sample of the model", title_align="left", expand=False))
    if sentence := savings(summary):
        console.print(Text(sentence), soft_wrap=True)
    console.print(Text(f"run folder: {folder}"), soft_wrap=True)
    can_go_on = summary["status"] != "complete" and not history.latest_start.would_end_the_same
    if can_go_on and find_checkpoints(folder)[0]:
        console.print(Text(f"to continue: {resume_command(folder)}"), soft_wrap=True)


def savings(summary: Summary) -> str:
    """Say in a sentence what DiLoCo saved and what it cost; empty for a run that failed. The cost in loss takes a
    data-parallel run to compare with."""
    reduction = summary["communication_reduction"]
    sent = summary["bytes_sent_per_worker"]
    if summary["mode"] != "diloco" or summary["workers"] < 2 or not reduction or reduction <= 1:
        return ""
    if summary["status"] == "failed":
        return ""
    bytes_ = f"{megabytes(sent)}, not {megabytes(summary['data_parallel_bytes_per_worker'])}"
    saved = f"A worker sent {times(reduction)} fewer bytes than with data-parallel training ({bytes_})"
    used = summary["compute_utilization"]
    seconds = summary["training_seconds"]
    if used is not None and seconds:
        saved += f" and spent {(1 - used) * seconds:.1f} s, {share(1 - used)} of its time, on rounds"
    return f"{saved}; what that cost in loss, `diloco compare` tells beside a run of --mode data-parallel."


def _rows(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("validation perplexity", _perplexity(summary)),
        ("inner steps", _steps(summary)),
        ("trained here", _local_work(summary)),
        ("parameters trained", _trained(summary)),
        (
            "tokens",
            f"{summary['tokens']:,}" + (" in the whole swarm" if summary.get("engine") in ("swarm", "bucket") else ""),
        ),
        ("warm start", _warm_start(summary)),
        ("outer steps", _rounds(summary)),
        ("a round, on average", _mean_round(summary)),
        ("contributions refused", str(summary.get("contributions_refused") or "")),
        ("states fetched from others", str(summary.get("resyncs") or "")),
        ("checkpoints not written", str(summary.get("checkpoints_failed") or "")),
        ("sent by a worker", megabytes(summary["bytes_sent_per_worker"])),
        ("data parallel sends", _baseline(summary)),
        ("compute utilisation", share(summary["compute_utilization"])),
        ("time", _time(summary)),
        ("anchors", _anchors(summary["anchor_digests"])),
    ]
    return [row for row in rows if row[1]]


def _perplexity(summary: Summary) -> str:
    before = summary["initial_validation_perplexity"]
    after = summary["validation_perplexity"]
    if after is None:
        return "not measured"
    start = f"{before:,.1f} before, " if before is not None else ""
    unigram = f" (unigram model: {summary['unigram_perplexity']:,.1f})" if summary["unigram_perplexity"] else ""
    when = "after" if summary["validation_step"] == summary["inner_steps"] else f"at step {summary['validation_step']}"
    return f"{start}[bold green]{after:,.2f} {when}[/]{unigram}"


def _steps(summary: Summary) -> str:
    each = "on each of" if summary["status"] == "complete" else "at most, on"
    if summary.get("engine") in ("swarm", "bucket"):
        seen = summary["members_seen"]
        at = f"{summary['inner_steps']:,}, in a swarm of {summary['workers']} at its end"
        return f"{at}, {seen} in all" if seen != summary["workers"] else at
    if summary["workers"] == 1:
        return f"{summary['inner_steps']:,}"
    return f"{summary['inner_steps']:,} {each} {summary['workers']} workers"


def _trained(summary: Summary) -> str:
    """Return how many parameters the rounds of a run with LoRA carry; empty if all are trained."""
    trained = summary.get("trainable_parameters")
    whole = summary["parameters"]
    if not trained or not whole or trained == whole:
        return ""
    return f"{trained:,} of {whole:,}, the LoRA adapters: only these are averaged"


def _local_work(summary: Summary) -> str:
    """Return what this machine's workers did themselves; empty if that is all there is."""
    if summary.get("engine") not in ("swarm", "bucket") or "local_steps" not in summary:
        return ""
    steps = summary["local_steps"]
    rounds = summary["local_rounds"]
    workers = summary["local_workers"]
    each = "" if workers == 1 else f" at most by each of {workers} workers"
    counts = [f"{steps:,} step{'s' * (steps != 1)}{each}", f"{summary['local_tokens']:,} tokens"]
    return ", ".join([*counts, f"in {rounds:,} round{'s' * (rounds != 1)}"])


def _time(summary: Summary) -> str:
    resumes = summary.get("resumes")
    again = f", resumed {resumes} times" if resumes and resumes > 1 else ", resumed once" if resumes else ""
    return f"{duration(summary['seconds'])} (training {duration(summary['training_seconds'])}{again})"


def _rounds(summary: Summary) -> str:
    if summary["mode"] != "diloco":
        return f"{summary['rounds']:,} (gradients averaged at every step)"
    failed = f", {summary['rounds_failed']} failed" if summary["rounds_failed"] else ""
    dropped = summary.get("rounds_dropped")
    failed += f", {dropped} contribution{'s' * (dropped > 1)} dropped on purpose" if dropped else ""
    often = f"{summary['num_inner_steps']}{' or more' if summary.get('resolved', {}).get('sync.growth') else ''}"
    return f"{summary['rounds']:,}{failed}, one every {often} inner steps, {summary['codec']}"


def _mean_round(summary: Summary) -> str:
    """Return the numbers of a round; empty without rounds, and for a summary of an earlier version."""
    means = summary.get("round_statistics") or {}
    shown = {name: statistic for name, statistic in ROUND_STATISTICS.items() if statistic.brief and name in means}
    return ", ".join(statistic.text(means[name]) for name, statistic in shown.items())


def _warm_start(summary: Summary) -> str:
    steps = summary.get("resolved", {}).get("sync.warm_start") or 0
    how = "by one worker alone" if summary.get("engine") in ("swarm", "bucket") else "data-parallel"
    first = "the first step" if steps == 1 else f"the first {steps:,} steps"
    return f"{first}, {how}" if steps and summary["mode"] == "diloco" else ""


def _baseline(summary: Summary) -> str:
    """Return what data-parallel training sends; empty for a run that ended before its first round: it has averaged
    nothing that could be compared."""
    if summary["mode"] != "diloco" or not summary["communication_reduction"] or not summary["rounds"]:
        return ""
    return (
        f"{megabytes(summary['data_parallel_bytes_per_worker'])} for the same steps: "
        f"[bold]{times(summary['communication_reduction'])} as much[/]"
    )


def _anchors(digests: list[str]) -> str:
    """Return the digests of the anchors; empty if the run ended before its workers compared them."""
    if not any(digests):
        return ""
    if len(set(digests)) == 1:
        return f"{digests[0]} on all {len(digests)} workers" if len(digests) > 1 else digests[0]
    return "[bold red]different[/]: " + ", ".join(digests)
