"""`diloco status RUN|INVITATION`: the workers of a swarm, their progress and speed, asked for over the network.

If no worker answers: how the run ended on this machine, as far as its run folder says.
"""

import json
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco.cli.config_parser import HYPHEN
from diloco.cli.display.numbers import duration
from diloco.cli.runs.ended_run import describe_end, folder_of, summary_of
from diloco.errors import ConfigError, DiLoCoError, EngineError, Excluded, RendezvousError
from diloco.history.figures import RunFigures
from diloco.history.log import EVENTS_FILE
from diloco.history.notes import printable
from diloco.history.run_history import LiveHistory, read_history
from diloco.run_lock import is_training
from diloco.swarm.installed import check_swarm
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.training.config.run_file import read_run_file
from diloco.training.records.run_description import MAX_BYTES, RUN_JSON, RunDescription
from diloco.training.records.run_folder import RUN_FILE, resume_command
from diloco.training.records.summary import Summary

if TYPE_CHECKING:
    from diloco.swarm.node.guest import Guest
    from diloco.swarm.protocol.status import MemberStatus, RunStatus

_COLUMNS = ("worker", "where", "step", "behind", "steps/s", "loss", "tokens", "gave", "heard", "latency", "")
_LEFT = ("worker", "where", "")
_WIDE_ONLY = ("tokens", "latency")
"""Left out in a terminal of less than _WIDE columns."""
_WIDE = 100
_WHERE = 16
_WATCH_SECONDS = 2.0


def status(
    run: Annotated[str, HYPHEN],
    /,
    *,
    watch: Annotated[bool, Parameter(name="--watch", negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show the workers of a swarm or a bucket: round, speed, lag, last contribution.

    Example:  diloco status runs/mine --watch

    Parameters
    ----------
    run
        A run folder of a swarm, or an invitation: `-` (standard input), `@FILE` or the word. Or the place of a bucket:
        s3://NAME/RUN, gs://NAME/RUN, az://NAME/RUN, file:///FOLDER/RUN.
    watch
        Show it again every two seconds, until Ctrl-C or the end of the run.
    as_json
        Print everything that is known, as JSON.
    """
    if watch and as_json:
        raise ConfigError("--watch with --json: leave out one of the two")
    if "://" in run:
        _show_bucket(run, watch=watch, as_json=as_json)
        return
    folder = Path(run) if len(run) < 256 and Path(run).exists() else None  # an invitation is longer
    if folder is not None and (folder / RUN_FILE).exists() and not (folder / SWARM_FOLDER).exists():
        if is_training(folder):
            _show_progress(folder, watch=watch, as_json=as_json)
            if not watch or is_training(folder):
                return
        _print_summary(folder, _summary_without_swarm(folder), as_json=as_json)
        return
    check_swarm()
    from diloco.swarm.node.guest import Guest

    invitation = _invitation(run, folder)
    console = Console()
    try:
        with ExitStack() as stack:
            with _asking(console, quiet=as_json):
                guest = stack.enter_context(Guest(invitation))
                steps = _steps(guest)
            if as_json:
                from msgspec import to_builtins

                print(json.dumps(to_builtins(guest.status()), indent=1))
            elif watch:
                _watch(console, guest, steps)
            else:
                console.print(_shown(guest.status(), steps, console), soft_wrap=not console.is_terminal)
    except Excluded:
        raise
    except RendezvousError as error:
        _print_end(folder or folder_of(invitation), error, as_json=as_json)


def _show_bucket(url: str, *, watch: bool, as_json: bool) -> None:
    """Show the workers of the run in a bucket; with `watch` until its end, or until Ctrl-C."""
    from diloco.training.processes.bucket_start import read_run

    console = Console()
    workers, steps = read_run(url)
    if as_json:
        from msgspec import to_builtins

        print(json.dumps(to_builtins(workers), indent=1))
        return
    if not watch:
        console.print(_shown(workers, steps, console), soft_wrap=not console.is_terminal)
        return
    try:
        with Live(_shown(workers, steps, console), console=console, auto_refresh=False) as live:
            while live_workers(workers):
                time.sleep(_WATCH_SECONDS)
                workers, steps = read_run(url)
                live.update(_shown(workers, steps, console), refresh=True)
    except KeyboardInterrupt:
        return


def _watch(console: Console, guest: "Guest", steps: int | None) -> None:
    """Show the members every few seconds, until Ctrl-C or until none answers any more."""
    swarm = guest.status()
    try:
        with Live(_shown(swarm, steps, console), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_SECONDS)
                swarm = guest.status()
                live.update(_shown(swarm, steps, console), refresh=True)
    except KeyboardInterrupt:
        return
    except EngineError as error:
        furthest = max((worker.position for worker in live_workers(swarm)), default=0)
        if steps is not None and furthest >= steps:
            console.print(Text(f"complete after {steps:,} steps"))
            return
        raise RendezvousError(str(error)) from error


def _summary_without_swarm(folder: Path) -> Summary:
    """Return the summary of a run that is not a swarm's, whose folder knows it all once it has ended."""
    summary = summary_of(folder)
    if summary is not None:
        return summary
    ended_at = progress_line(folder, RunFigures(read_history(folder)))
    raise ConfigError(
        f"{folder} is not a run of a swarm, whose workers could be asked. It ended without a summary (killed, or its "
        f"disk was full) at {ended_at}: {resume_command(folder)} continues it; what it has done so far is in "
        f"{folder / EVENTS_FILE}"
    )


def progress_line(folder: Path, figures: RunFigures) -> str:
    """Return how far a run with a fixed set of workers is, from its log."""
    steps = read_run_file(folder / RUN_FILE).get("steps")
    parts = [f"step {figures.step:,}" + (f" of {steps:,} ({figures.step / steps:.0%})" if steps else "")]
    if figures.loss is not None:
        parts.append(f"loss {figures.loss:.3f}")
    if figures.perplexities:
        step, perplexity = figures.perplexities[-1]
        parts.append(f"validation perplexity {perplexity:.2f} at step {step:,}")
    if figures.tokens_per_second:
        parts.append(f"{figures.tokens_per_second:,.0f} tokens/s")
    parts.append("1 round" if figures.merged_rounds == 1 else f"{figures.merged_rounds:,} rounds")
    left = figures.seconds_left(steps)
    return " · ".join(parts) if left is None else " · ".join([*parts, f"left {duration(left)}"])


def _show_progress(folder: Path, *, watch: bool, as_json: bool) -> None:
    """Show a run on this machine that trains now; with `watch` until it has ended, or until Ctrl-C."""
    live = LiveHistory(folder)
    live.refresh()
    if as_json:
        now = RunFigures(live.history)
        progress = {"step": now.step, "loss": now.loss, "rounds": now.merged_rounds, "validations": now.perplexities}
        progress["tokens_per_second"] = now.tokens_per_second
        print(json.dumps({"folder": str(folder), "status": "training", **progress}, indent=1))
        return
    console = Console()
    while True:
        console.print(Text(f"training: {progress_line(folder, RunFigures(live.history))}"), soft_wrap=True)
        if not watch:
            return
        try:
            time.sleep(_WATCH_SECONDS)
        except KeyboardInterrupt:
            return
        if not is_training(folder):
            return
        live.refresh()


def _asking(console: Console, *, quiet: bool) -> AbstractContextManager[object]:
    """Show something that moves while the members are looked for, which may take some seconds."""
    return nullcontext() if quiet or not console.is_terminal else console.status("asking the members of the run")


def _print_end(folder: Path | None, error: RendezvousError, *, as_json: bool) -> None:
    """Print how the run ended here; raise the error if that is not known."""
    summary = summary_of(folder)
    if folder is None or summary is None:
        prefix = "" if folder is None else _local_state(folder)
        raise RendezvousError(f"{prefix}{error}")
    _print_summary(folder, summary, as_json=as_json)


def _print_summary(folder: Path, summary: Summary, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"folder": str(folder), "summary": summary}, indent=1))
        return
    for line in describe_end(folder, summary):
        Console().print(Text(printable(line)), soft_wrap=True)


def _local_state(folder: Path) -> str:
    return (
        f"{'its workers here do not answer' if is_training(folder) else 'no worker of it runs on this machine'}, and "
    )


def _invitation(run: str, folder: Path | None) -> Any:
    """Return the invitation given, or the one of the run folder with the addresses that are known there."""
    from diloco.swarm.trust import run_owner
    from diloco.swarm.trust.invitation import is_word, read_invitations

    if folder is None:
        if is_word(run) and ("/" in run or run.startswith(".")):
            raise ConfigError(f"{run} is not a run folder: there is no such folder, and it is not an invitation")
        return read_invitations([run], time.time())[0]
    return run_owner.own_invitation(run_owner.swarm_folder(folder), None)


def _steps(guest: "Guest") -> int | None:
    """Return the inner steps of the whole run, as the members describe it; None if they do not."""
    with TemporaryDirectory(prefix="diloco-") as temporary:
        path = Path(temporary) / RUN_JSON
        try:
            guest.fetch(RUN_JSON, path, MAX_BYTES)
            return int(RunDescription.read(path).values["steps"])
        except (DiLoCoError, OSError):
            return None


# The picture


def _shown(swarm: "RunStatus", steps: int | None, console: Console) -> RenderableType:
    head = [Text(printable(line)) for line in headlines(swarm, steps)]
    if console.is_terminal:
        return Group(*head, table(swarm, steps, wide=console.width >= _WIDE))
    return Group(*head, *(Text(line) for line in lines(swarm, steps)))


def headlines(swarm: "RunStatus", steps: int | None = None) -> list[str]:
    live = live_workers(swarm)
    leader = next((str(worker.number) for worker in live if worker.peer == swarm.leader), "none")
    rounds = sorted(map(int, swarm.leading))
    now = f"round {rounds[0]} in progress ({swarm.leading[str(rounds[0])]})" if rounds else "between rounds"
    in_bucket = "://" in swarm.run
    known = (
        [member for member in swarm.members if member.number >= 0] if in_bucket else live
    )  # it has all that left too
    ended = max((worker.ended_round + 1 for worker in known), default=0)
    counted = "1 round" if ended == 1 else f"{ended} rounds"
    speed = sum(1 / worker.step_seconds for worker in live if worker.step_seconds > 0)
    workers = "1 worker" if len(live) == 1 else f"{len(live)} workers"
    furthest = max((worker.position for worker in known), default=0)
    of = "" if not steps else f" of {steps:,} ({furthest / steps:.0%})"
    tokens = max((worker.run_tokens for worker in known), default=0)
    done = "complete after" if steps is not None and furthest >= steps else "step"
    in_all = [f"{tokens:,} tokens of all workers in the run's means"] if tokens else []
    return [
        f"run {swarm.run} · {done} {furthest:,}{of if done == 'step' else ' steps'} · {workers} · {counted}",
        f"{speed:.2f} steps/s in all" if in_bucket else f"{now} · {speed:.2f} steps/s in all · led by worker {leader}",
        *in_all,
    ]


def live_workers(swarm: "RunStatus") -> "list[MemberStatus]":
    return [member for member in swarm.members if member.live and member.number >= 0]


def rows(swarm: "RunStatus", steps: int | None = None) -> list[tuple[str, ...]]:
    """Return a row for each worker that is here, or was and may come back. `steps`: of the whole run, if known."""
    first = max((member.position for member in live_workers(swarm)), default=0)
    shown = [member for member in swarm.members if member.number >= 0]
    return [
        (
            str(member.number),
            _where(member),
            str(member.position),
            str(first - member.position) if member.live else "-",
            f"{1 / member.step_seconds:.2f}" if member.step_seconds > 0 else "-",
            f"{member.loss:.3f}" if member.loss >= 0 else "-",
            f"{member.tokens:,}" if member.tokens else "-",
            f"round {member.contributed_round}" if member.contributed_round >= 0 else "none yet",
            _ago(member.silent_seconds) if _was_heard(member) else "never",
            f"{1000 * member.latency_seconds:.0f} ms" if member.latency_seconds else "-",
            _state(member, steps),
        )
        for member in shown
    ]


def _where(member: "MemberStatus") -> str:
    """Return the machine's name, as much of it as fits, and the end of the peer's id, by which it can be revoked."""
    label = printable(member.label or "-")
    label = label if len(label) <= _WHERE - 7 else label[: _WHERE - 8] + "…"
    return f"{label} {member.peer[-6:]}".rstrip()


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else "hours"


def _was_heard(member: "MemberStatus") -> bool:
    """Return False if this worker is known only from others: then nothing but its number is known."""
    return bool(member.live or member.left or member.label or member.position)


def _state(member: "MemberStatus", steps: int | None) -> str:
    if member.left:
        return "left"
    if not _was_heard(member):
        return "not met"
    if not member.live:
        return "lost"
    if steps is not None and member.position >= steps:
        return "done"
    return "training" if member.has_state else "joining"


def lines(swarm: "RunStatus", steps: int | None = None) -> list[str]:
    cells = [zip(_COLUMNS, row, strict=True) for row in rows(swarm, steps)]
    return ["  ".join(f"{name} {cell}".strip() for name, cell in row) for row in cells]


def table(swarm: "RunStatus", steps: int | None = None, *, wide: bool) -> Table:
    """Return the workers as a table, which fits 80 columns if it is not `wide`."""
    shown = [name for name in _COLUMNS if wide or name not in _WIDE_ONLY]
    made = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="dim")
    for name in shown:
        made.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in rows(swarm, steps):
        made.add_row(*(cell for name, cell in zip(_COLUMNS, row, strict=True) if name in shown))
    return made
