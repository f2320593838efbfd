"""Start `diloco train` on a tiny text, watch it, signal it, and see that nothing of it is left."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.training.records.summary import Summary, read_summary
from support.event_log import Event, read_events
from support.forks import Launch, fork_command

LONG = 100.0
"""Seconds for what takes a few on an idle machine."""

SMALL = ("--model.hidden_size=48", "--model.num_layers=2", "--model.num_heads=2")
"""A model so small that the start and the end of a run take most of its time."""

SENTENCES = (
    "the cat sat on the mat and looked at the rain",
    "a small bird sings while the green hills sleep",
    "nobody knows how far the old dog ran last night",
    "every worker trains alone and averages now and then",
    "count the bytes twice before you send them away",
)


def write_text(path: Path, lines: int = 3000) -> Path:
    """A text that is easy to learn: five sentences in a random order."""
    order = random.Random(0)
    path.write_text("\n".join(order.choice(SENTENCES) for _ in range(lines)))
    return path


def tiny_options(text: Path) -> list[str]:
    """Everything as small as it goes; prepared data is shared by all runs on the same text."""
    return [
        *(f"--data.source={text}", f"--data.cache_dir={text.parent / 'cache'}", "--data.vocab_size=300"),
        *("--data.sequence_length=16", "--data.shards=4", "--training.batch_size=8", "--training.eval_windows=16"),
        *("--training.log_interval=1", "--training.sample_tokens=5", "--inner.warmup_steps=4"),
        *("--device=cpu", "--threads=1", "--model=tiny", "--recipe=plain", *SMALL),
    ]


class Run:
    """One `diloco`, in a session of its own, so that whatever it leaves behind can be found."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        launch: Launch = fork_command,
    ) -> None:
        """`launch=run_command`: `arguments` are a whole command line, in a new interpreter."""
        self.folder = folder
        self._output = folder.with_name(folder.name + ".stdout")
        self._errors = folder.with_name(folder.name + ".stderr")
        given = {**os.environ, "COLUMNS": "100", **(environment or {})}
        self.process = launch(arguments, given, self._output, self._errors)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in [*self.left(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def events(self) -> list[Event]:
        return read_events(self.folder)

    @property
    def summary(self) -> Summary:
        return read_summary(self.folder)

    def code(self, seconds: float = LONG) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(seconds)

    def wait_until(self, happened: Callable[[], Any], what: str, seconds: float = LONG) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.output}\n{self.errors}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Until every worker has logged this step."""

        def reached() -> bool:
            assert self.process.poll() is None, f"ended early\n{self.output}\n{self.errors}"
            seen = {event["worker"] for event in self.events if event["type"] == "step" and event["step"] >= step}
            return len(seen) == 2

        self.wait_until(reached, f"step {step}")

    def workers(self) -> list[int]:
        """Process ids of the workers, in their order: they are started one after the other."""
        mine = self.processes()
        own = next((command for pid, command in mine if pid == self.process.pid), "")
        return sorted(
            pid for pid, command in mine if "spawn_main" in command or (command == own and pid != self.process.pid)
        )

    def left(self) -> list[int]:
        """Processes of this run that are still there, apart from the launcher itself."""
        return [pid for pid, _ in self.processes() if pid != self.process.pid]

    def assert_nothing_is_left(self, seconds: float = LONG) -> None:
        self.wait_until(lambda: not self.processes(), f"processes {self.processes()} to end", seconds)

    def processes(self) -> list[tuple[int, str]]:
        """Of this run's session, or (torchrun's ranks have sessions of their own) with its folder as an option."""
        mine = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has just ended
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    command = (entry / "cmdline").read_text().split("\0")
                    ours = os.getsid(int(entry.name)) == self.process.pid or f"--out={self.folder}" in command
                    if ours and state != "Z":
                        mine.append((int(entry.name), " ".join(command)))
        return mine


def start(
    folder: Path,
    text: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    launch: Launch = fork_command,
) -> Run:
    return Run(folder, ["train", *tiny_options(text), f"--out={folder}", *options], environment, launch)


def completed(folder: Path, text: Path, *options: str, launch: Launch = fork_command) -> Run:
    """A run that must end well and leave nothing behind."""
    with start(folder, text, *options, launch=launch) as run:
        assert run.code() == 0, run.errors
        assert run.summary["status"] == "complete"
        assert run.errors == ""
        run.assert_nothing_is_left()
        return run
