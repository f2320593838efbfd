"""The sizes of a run in words: three lines when it starts, a table for `--estimate`, the measured rate after rounds."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.history.rounds import RoundHistory
from diloco.history.run_history import LiveHistory
from diloco.training.sizes.room import size_text

Sizes = Mapping[str, Any]
_DAY_SECONDS = 86_400.0


def size_lines(sizes: Sizes) -> list[str]:
    """Return memory, disk and network, in a line each. `sizes` are an Estimate as JSON."""
    return [_memory(sizes), _disk(sizes), _network(sizes)]


def _memory(sizes: Sizes) -> str:
    gpu = f" and {size_text(sizes['device_bytes'])} on its GPU" if sizes["device_bytes"] else ""
    if sizes["network_process_bytes"]:
        gpu += f" and {size_text(sizes['network_process_bytes'])} for its network"
    free = sizes["memory_available"]
    available = "" if free is None else f", {size_text(free)} available"
    processes = "1 process" if sizes["processes"] == 1 else f"{sizes['processes']} processes"
    return (
        f"memory: about {size_text(sizes['process_bytes'])} a process{gpu} ({processes}{available}); "
        f"{sizes['parameters'] / 1e6:.4g}M parameters{_trained(sizes)}{_at_a_time(sizes)}"
    )


def _at_a_time(sizes: Sizes) -> str:
    rows = sizes.get("micro_batch_rows")  # older runs do not tell them
    parts = sizes.get("accumulation")
    if not rows or not parts:
        return ""
    number = "1 sequence" if rows == 1 else f"{rows:,} sequences"
    return f"; a step is {number} at once" if parts == 1 else f"; a step is {parts} times {number}"


def _trained(sizes: Sizes) -> str:
    trained = sizes.get("trainable_parameters", sizes["parameters"])  # older runs do not tell it
    return f", of which {trained / 1e6:.3g}M are trained and sent (LoRA)" if trained < sizes["parameters"] else ""


def _disk(sizes: Sizes) -> str:
    disk = sizes["disk"]
    if not disk["checkpoints"]:
        return f"disk: {size_text(disk['model_bytes'])} for the model, no checkpoints"
    kept = f"{disk['at_once']} at a time" if disk["checkpoints"] > 1 else "one, at the end"
    total = f", {disk['checkpoints']} in all" if disk["checkpoints"] > disk["at_once"] else ""
    return (
        f"disk: {size_text(sizes['disk_peak_bytes'])} ({size_text(sizes['disk_free'])} free): checkpoints of "
        f"{size_text(disk['checkpoint_bytes'])}, {kept}{total}; the model {size_text(disk['model_bytes'])}"
    )


def _network(sizes: Sizes) -> str:
    if not sizes["round_bytes"]:
        return "network: nothing is sent, this worker is alone"
    steps = sizes["round_steps"]
    mean = sizes.get("mean_round_steps", steps)  # older runs do not tell it
    later = f", later fewer times (every {mean:.0f} on average)" if mean > steps else ""
    often = "at every step" if steps == mean == 1 else f"every {steps} steps{later}"
    times = ", ".join(
        f"{_seconds(took)} at {_rate(1e6 * float(rate))}" for rate, took in sizes["round_seconds"].items()
    )
    daily = f"; {_daily(sizes)}" if sizes["bytes_per_day"] is not None else ""
    warm = sizes.get("warm_start_bytes", 0)  # older runs do not tell it
    first = f"{size_text(warm)} in the warm start, then " if warm else ""
    more = _second_moments(sizes)
    return f"network: a worker sends {first}{size_text(sizes['round_bytes'])} {often}{more}: {times}{daily}"


def _second_moments(sizes: Sizes) -> str:
    size = sizes.get("second_moment_bytes", 0)  # older runs do not tell it
    every = sizes.get("second_moment_every", 0)
    return f", and {size_text(size)} of second moments in every {every}th round" if size else ""


def _daily(sizes: Sizes) -> str:
    size = f"{size_text(sizes['bytes_per_day'])} a day"
    return f"{size} at the measured speed" if sizes["step_measured"] else f"roughly {size}"


def estimate_table(sizes: Sizes) -> Table:
    """Return a table of all sizes, for `--estimate`."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for title, parts in (
        ("memory of a process", sizes["memory"]),
        ("GPU memory of a process", sizes["device_memory"]),
        ("memory of its network processes", sizes["network_memory"]),
    ):
        if parts:
            table.add_row(Text(title, style="bold"), Text(size_text(sum(parts.values())), style="bold"))
            for name, size in parts.items():
                table.add_row(f"  {name}", size_text(size))
    disk = sizes["disk"]
    table.add_row(Text("disk, at most", style="bold"), Text(size_text(sizes["disk_peak_bytes"]), style="bold"))
    table.add_row("  a checkpoint of this machine's workers", size_text(disk["checkpoint_bytes"]))
    table.add_row("  checkpoints at a time, of all", f"{disk['at_once']} of {disk['checkpoints']}")
    table.add_row("  written in the whole run", size_text(sizes["disk_written_bytes"]))
    table.add_row("  the model", size_text(disk["model_bytes"]))
    table.add_row(Text("sent by a worker a round", style="bold"), Text(size_text(sizes["round_bytes"]), style="bold"))
    steps = sizes["round_steps"]
    mean = sizes["mean_round_steps"]
    growing = f" at first, {mean:.0f} on average" if mean > steps else ""
    table.add_row("  inner steps from one round to the next", f"{steps}{growing}")
    if sizes["second_moment_bytes"]:
        every = sizes["second_moment_every"]
        table.add_row(f"  second moments, besides, every {every} rounds", size_text(sizes["second_moment_bytes"]))
    for rate, took in sizes["round_seconds"].items():
        table.add_row(f"  time at {_rate(1e6 * float(rate))}", _seconds(took))
    if sizes["bytes_per_day"] is not None:
        how = "measured" if sizes["step_measured"] else "roughly, by this machine's matrix speed"
        table.add_row(f"  an inner step, {how}", _seconds(sizes["step_seconds"]))
        table.add_row("  sent by a worker a day, at that speed", size_text(sizes["bytes_per_day"]))
    return table


def sizes_printer(console: Console, live: LiveHistory) -> Callable[[], None]:
    """Return a function to call several times a second: it prints the lines of the event `sizes`, and what two rounds
    took.

    What `live` has by now is of earlier starts.
    """
    begins = live.history.clock.last or 0.0
    has_printed = False
    has_measured = False

    def poll() -> None:
        nonlocal has_printed, has_measured
        if has_printed and has_measured:
            return
        event = live.history.sizes
        if event is not None and event.time > begins and not has_printed:
            has_printed = True
            for line in size_lines(event.sizes):
                console.print(Text(line), soft_wrap=not console.is_terminal, highlight=False)
            for warning in event.warnings:
                console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True, highlight=False)
        rounds = [round_ for round_ in live.history.rounds.until(None) if round_.merged and round_.time > begins]
        first, second = ([round_ for round_ in rounds if round_.fragment == 0] + [None, None])[:2]
        if first is not None and second is not None and not has_measured:
            has_measured = True
            measured = measured_line(first, second)
            if measured is not None:
                console.print(Text(measured), soft_wrap=not console.is_terminal, highlight=False)

    return poll


def measured_line(first: RoundHistory, second: RoundHistory) -> str | None:
    """Return what a round really took, and what that is in a day, by two rounds; None if nothing was sent."""
    sent = second.bytes_sent
    took = second.statistics["seconds"]
    between = second.time - first.time
    if not sent or not took or between <= 0:
        return None
    return (
        f"measured: a round took {_seconds(took)} ({_rate(8 * sent / took)}), one every {_seconds(between)}: "
        f"{size_text(sent / between * _DAY_SECONDS)} a day from each worker"
    )


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
