"""`diloco sink RUN NAME`: write a run, in progress or ended, to W&B, TensorBoard or trackio."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from diloco.errors import DiLoCoError, SinkFailed
from diloco.sinks.follower import Follower, open_follower, sink_folder
from diloco.sinks.registry import SINKS, check_installed
from diloco.training.records.run_folder import check_run_folder
from diloco.training.records.summary import SUMMARY_FILE

_TURN_SECONDS = 1.0


def sink(run: Path, name: Literal["tensorboard", "wandb", "trackio"], /) -> None:
    """Write a run to TensorBoard, W&B or trackio; follows a run in progress to its end.

    It continues where it stopped: RUN/sinks/NAME says how far it came; remove that folder to start again.
    Example:  diloco sink runs/2026-01-31-101500-tiny tensorboard

    Parameters
    ----------
    run
        A run folder.
    name
        tensorboard, wandb or trackio.
    """
    check_run_folder(run)
    check_installed([name])
    console = Console()
    with ExitStack() as stack:
        try:
            follower = stack.enter_context(open_follower(run, name, SINKS[name]))
        except DiLoCoError:
            raise
        except Exception as error:  # the package's own: no login, no server
            raise SinkFailed(f"the sink {name} could not be started: {type(error).__name__}: {error}") from error
        _to_the_end(follower, console)
    state = follower.state
    console.print(Text(f"{state.events:,} events of {run} are in {name} ({sink_folder(run, name)})"), soft_wrap=True)
    if state.error is not None:
        raise SinkFailed(f"the sink {name} could not write {state.lost} events, the first because: {state.error}")


def _to_the_end(follower: Follower, console: Console) -> None:
    follower.catch_up()
    if (follower.run / SUMMARY_FILE).exists():
        return
    console.print("the run has not ended: following it (Ctrl-C ends this, not the run)", highlight=False)
    try:
        while not (follower.run / SUMMARY_FILE).exists():
            time.sleep(_TURN_SECONDS)
            follower.catch_up()
    except KeyboardInterrupt:
        console.print("stopped; the same command continues from here", highlight=False)
