"""What this machine knows of a swarm's run that no worker answers for: its end, from the run folders that are here."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.display.numbers import duration
from diloco.errors import ConfigError
from diloco.history.run_history import read_history
from diloco.run_lock import is_training
from diloco.swarm.run_files import INVITATION_FILES, SWARM_FOLDER
from diloco.training.config.run_file import read_run_file
from diloco.training.records.run_folder import RUN_FILE, resume_command
from diloco.training.records.summary import Summary, read_summary

if TYPE_CHECKING:
    from diloco.swarm.trust.invitation import Invitation

_RUNS = Path("runs")


def folder_of(invitation: "Invitation", runs: Path = _RUNS) -> Path | None:
    """Return the folder of the same run on this machine; of several one that is complete, then the newest."""
    folders = [folder for folder, known in _invitations(runs) if known.run_id == invitation.run_id]
    return max(folders, key=lambda folder: (_is_complete(folder), folder.stat().st_mtime), default=None)


def folder_with(invitation: "Invitation", runs: Path = _RUNS) -> Path | None:
    """Return the folder on this machine whose worker has joined with this very invitation."""
    return next(
        (
            folder
            for folder, known in _invitations(runs)
            if known.id == invitation.id and any((folder / SWARM_FOLDER).glob("worker-*.key"))
        ),
        None,
    )


def _invitations(runs: Path) -> "Iterator[tuple[Path, Invitation]]":
    """Yield the run folders here, each with its workers' invitations."""
    from diloco.swarm.trust.invitation import Invitation

    for path in runs.glob(f"*/{SWARM_FOLDER}/{INVITATION_FILES}"):
        try:
            yield path.parent.parent, Invitation.parse(path.read_text(), None)
        except (ConfigError, OSError, ValueError):
            continue


def summary_of(folder: Path | None) -> Summary | None:
    """Return the summary of a run that has ended on this machine; None if it has not, or if there is no such folder."""
    if folder is None or is_training(folder):
        return None
    try:
        return read_summary(folder)
    except ConfigError:
        return None


def _is_complete(folder: Path) -> bool:
    summary = summary_of(folder)
    return summary is not None and summary["status"] == "complete"


def describe_end(folder: Path, summary: Summary) -> list[str]:
    """Return the lines that say how the run ended here."""
    steps = summary["inner_steps"]
    status = summary["status"]
    if status == "complete":
        lines = [f"complete after {steps:,} steps ({folder})"]
    else:
        of = read_run_file(folder / RUN_FILE).get("steps", steps)
        place = " on this machine" if summary.get("engine") in ("swarm", "bucket") else ""
        lines = [f"{status}{place} after {steps:,} of {of:,} steps ({folder})"]
        if summary["error"]:
            lines.append(f"reason: {summary['error']}")
    perplexity = summary["validation_perplexity"]
    if perplexity is not None:
        lines.append(f"validation perplexity {perplexity:,.2f} at step {summary['validation_step']:,}")
    rounds = "1 round" if summary["rounds"] == 1 else f"{summary['rounds']:,} rounds"
    whole = " in the whole swarm" if summary.get("engine") in ("swarm", "bucket") else ""
    lines.append(f"{rounds}, {summary['tokens']:,} tokens{whole}, {duration(summary['seconds'])} here")
    if status != "complete":
        if summary.get("engine") in ("swarm", "bucket"):
            lines.append("no worker answers: the others have ended too, or cannot be reached from here")
        if not read_history(folder).latest_start.would_end_the_same:
            lines.append(f"to continue: {resume_command(folder)}")
    return lines
