"""Runs side by side: what each was asked to do, what came of it, and how it stands against the reference run."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from diloco.cli.display.numbers import duration, megabytes, share, times
from diloco.core.config import OUTER_NUMBERS
from diloco.models.pretrained import short_name
from diloco.training.records.summary import Summary, perplexity_gap

_SYNC: dict[str, tuple[str, object]] = {
    "warm_start": ("warm start", 0),
    "fragments": ("fragments", 1),
    "fragments_by_hand": ("fragments by hand", None),
    "overlap_steps": ("overlap steps", 0),
    "mixing": ("mixing", 0.0),
    "outer_overlap": ("outer overlap", "none"),
    "error_feedback": ("error feedback", None),
    "error_decay": ("error decay", None),
    "prune": ("prune", None),
    "growth": ("growth", None),
}
"""More of `sync.`: the title of its row, which is there if a run has another value than this usual one."""
_NARROWEST = 14  # characters of a run's column: with more runs than fit, there are several tables


@dataclass(frozen=True)
class ComparedRun:
    """A run that has ended."""

    name: str
    folder: Path
    summary: Summary
    options: Mapping[str, Any]
    """The dotted keys of its config.toml; empty if it has none."""

    def values(self, reference: "ComparedRun") -> dict[str, Any]:
        """Return everything that is compared, by name; None where it is not known or has no meaning."""
        summary = self.summary
        option = self.options.get
        diloco = summary["mode"] == "diloco"
        sent = summary["bytes_sent_per_worker"]
        reference_sent = reference.summary["bytes_sent_per_worker"]
        both_averaged = summary["rounds"] and reference.summary["rounds"]
        outer = self._outer() if diloco else {}
        return {
            "is_reference": self is reference,
            "status": summary["status"],
            "mode": summary["mode"],
            "model": summary["model"],
            "parameters": summary["parameters"],
            "workers": summary["workers"],
            "seed": option("seed"),
            "data_source": option("data.source"),
            "partition": option("data.partition"),
            "batch_size": option("training.batch_size"),
            "sequence_length": option("data.sequence_length"),
            "inner_steps": summary["inner_steps"],
            "tokens": summary["tokens"],
            "inner_optimizer": option("inner.optimizer"),
            "inner_lr": option("inner.lr"),
            "num_inner_steps": summary["num_inner_steps"] if diloco else None,
            "outer_optimizer": option("outer.optimizer") if diloco else None,
            **{f"outer_{name}": outer.get(name) for name in ("lr", "momentum", "beta1", "beta2", "epsilon")},
            "codec": summary["codec"],
            **{name: option(f"sync.{name}") if diloco else None for name in _SYNC},
            "rounds": summary["rounds"],
            "rounds_failed": summary["rounds_failed"],
            "validation_loss": summary["validation_loss"],
            "validation_perplexity": summary["validation_perplexity"],
            "validation_step": summary["validation_step"],
            "validated_at_end": _validated_at_end(summary),
            "gap_is_of_the_ends": _validated_at_end(summary) and _validated_at_end(reference.summary),
            "perplexity_gap": perplexity_gap(summary, reference.summary),
            "same_tokens": summary["tokens"] == reference.summary["tokens"],
            "bytes_sent_per_worker": sent,
            "bytes_ratio": sent / reference_sent if sent and reference_sent and both_averaged else None,
            "compute_utilization": summary["compute_utilization"],
            "training_seconds": summary["training_seconds"],
        }

    def _outer(self) -> dict[str, Any]:
        """Return the numbers of the outer optimizer, with its defaults where the run file gives none."""
        defaults = OUTER_NUMBERS.get(str(self.options.get("outer.optimizer")), {})
        return {name: self.options.get(f"outer.{name}", default) for name, default in defaults.items()}


def _validated_at_end(summary: Summary) -> bool:
    """Return whether the last validation is of the last step: a run that ended early may have an earlier one."""
    return bool(summary["validation_step"] == summary["inner_steps"])


def default_reference(runs: Sequence[ComparedRun]) -> ComparedRun:
    """Return the first data-parallel run, or else the first run."""
    return next((run for run in runs if run.summary["mode"] == "data-parallel"), runs[0])


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return each folder's name, with as many parents as it takes to tell it from the others."""
    parts = [folder.absolute().parts for folder in folders]
    names = []
    for mine in parts:
        others = [theirs for theirs in parts if theirs != mine]
        count = next(n for n in range(1, len(mine) + 1) if all(mine[-n:] != theirs[-n:] for theirs in others))
        names.append(str(Path(*mine[-count:])))
    return names


def tables(runs: Sequence[ComparedRun], reference: ComparedRun, width: int) -> list[Table]:
    """Return the runs as columns. Names are folded, never cut; what does not fit beside each other comes below."""
    titles = max(map(len, _ROWS))
    beside = max(1, (width - titles - 4) // (_NARROWEST + 3))
    values = [run.values(reference) for run in runs]
    cells = {title: [cell(run_values) for run_values in values] for title, cell in _ROWS.items()}
    rows = {title: row for title, row in cells.items() if set(row) != {"-"}}
    return [
        _table([run.name for run in runs[first : first + beside]], rows, first) for first in range(0, len(runs), beside)
    ]


def _table(names: Sequence[str], rows: Mapping[str, Sequence[str]], first: int) -> Table:
    table = Table(title=None if first else "runs side by side", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for title, cells in rows.items():
        table.add_row(title, *(Text(cell) for cell in cells[first : first + len(names)]))
    return table


def savings(run: ComparedRun, reference: ComparedRun) -> str:
    """Say in a sentence what DiLoCo saved and cost against data-parallel training; empty if the two cannot be
    compared."""
    values = run.values(reference)
    reference_values = reference.values(reference)
    modes = (values["mode"], reference_values["mode"])
    if modes != ("diloco", "data-parallel") or not values["same_tokens"] or not values["gap_is_of_the_ends"]:
        return ""
    if not values["bytes_ratio"] or values["perplexity_gap"] is None:
        return ""
    loss = values["validation_loss"]
    base = reference_values["validation_loss"]
    changed = f"{abs(loss - base):.3f} ({abs(loss / base - 1):.1%}) {'higher' if loss >= base else 'lower'}"
    return (
        f"{run.name} sent {times(1 / values['bytes_ratio'])} fewer bytes than {reference.name} for the same tokens, "
        f"and its validation loss is {changed}."
    )


def as_json(runs: Sequence[ComparedRun], reference: ComparedRun) -> dict[str, Any]:
    return {
        "reference": reference.name,
        "runs": [{"name": run.name, "folder": str(run.folder)} | run.values(reference) for run in runs],
    }


def as_csv(runs: Sequence[ComparedRun], reference: ComparedRun) -> str:
    """Return CSV with a line for each run."""
    rows = as_json(runs, reference)["runs"]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


Values = Mapping[str, Any]
Cell = Callable[[Values], str]


def _plain(key: str) -> Cell:
    return lambda values: "-" if values[key] is None else str(values[key])


def _unusual(key: str, usual: object) -> Cell:
    return lambda values: "-" if values[key] in (None, usual) else str(values[key])


def _number(key: str, form: str) -> Cell:
    return lambda values: "-" if values[key] is None else format(values[key], form)


def _validation(key: str, form: str) -> Cell:
    """Return the cell of a number of the last validation, with its step if that is not the run's last one."""

    def cell(values: Values) -> str:
        if values[key] is None:
            return "-"
        return format(values[key], form) + (
            "" if values["validated_at_end"] else f" at step {values['validation_step']:,}"
        )

    return cell


def _model(values: Values) -> str:
    size = f" ({values['parameters'] / 1e6:.2f}M)" if values["parameters"] else ""
    return f"{short_name(values['model'])}{size}"


def _source(values: Values) -> str:
    return "-" if values["data_source"] is None else short_name(values["data_source"])


def _batch(values: Values) -> str:
    both = values["batch_size"], values["sequence_length"]
    return "-" if None in both else f"{both[0]} x {both[1]} tokens"


def _gap(values: Values) -> str:
    if values["is_reference"]:
        return "reference"
    if values["perplexity_gap"] is None:
        return "-"
    unequal = [
        *([] if values["same_tokens"] else ["other tokens"]),
        *([] if values["gap_is_of_the_ends"] else ["not at the end"]),
    ]
    return f"{values['perplexity_gap']:+.2%}" + (f" ({', '.join(unequal)})" if unequal else "")


def _less(values: Values) -> str:
    if values["is_reference"]:
        return "reference"
    ratio = values["bytes_ratio"]
    if ratio is None:
        return "-"
    less = f"{1 / ratio:,.1f}x less" if ratio < 1 else f"{ratio:,.1f}x more"
    return ("as much" if 0.95 < ratio < 1.05 else less) + ("" if values["same_tokens"] else " (other tokens)")


_ROWS: dict[str, Cell] = {
    "status": _plain("status"),
    "mode": _plain("mode"),
    "model": _model,
    "workers": _plain("workers"),
    "seed": _plain("seed"),
    "data": _source,
    "partition": _plain("partition"),
    "batch": _batch,
    "inner steps": _number("inner_steps", ","),
    "tokens": _number("tokens", ","),
    "inner optimizer": _plain("inner_optimizer"),
    "inner learning rate": _plain("inner_lr"),
    "H": _plain("num_inner_steps"),
    "outer optimizer": _plain("outer_optimizer"),
    "outer learning rate": _plain("outer_lr"),
    "outer momentum": _plain("outer_momentum"),
    "codec": _plain("codec"),
    **{title: _unusual(name, usual) for name, (title, usual) in _SYNC.items()},
    "outer steps": _number("rounds", ","),
    "validation loss": _validation("validation_loss", ".4f"),
    "validation perplexity": _validation("validation_perplexity", ".2f"),
    "perplexity against reference": _gap,
    "sent by a worker": lambda values: megabytes(values["bytes_sent_per_worker"]),
    "sent against reference": _less,
    "compute utilisation": lambda values: share(values["compute_utilization"]),
    "training time": lambda values: duration(values["training_seconds"]),
}
