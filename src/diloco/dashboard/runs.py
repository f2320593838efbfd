"""The runs that a dashboard shows: one run folder, or all in a folder of runs. Reads, and never writes."""

import json
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from diloco.dashboard.series import series
from diloco.dashboard.snapshot import SILENT_SECONDS, round_json, snapshot
from diloco.errors import ConfigError
from diloco.history.events import EVENTS_VERSION
from diloco.history.figures import RunFigures
from diloco.history.log import EVENTS_FILE, decode_line
from diloco.history.run_history import LiveHistory, RunHistory
from diloco.history.workers import DOING
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import SUMMARY_FILE

Json = dict[str, Any]
_DEEPEST = 3
_MOST_RUNS = 500
_MOST_FOLDERS = 5000
_MOST_FILE_BYTES = 16 << 20
_DECODER = msgspec.json.Decoder()
_SHALLOW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LONG_LINE = 8192
_REPEATED_FIELDS = ("cosines", "members")
"""Fields of a round that every worker of this machine reports alike: large, so they are decoded once."""


class Run:
    """One run folder. Any thread may call it; what was appended to the log is read at every call of `refresh`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.version = 0
        """Rises with every change."""
        self._lock = threading.Lock()
        self._live = LiveHistory(folder, decoder=QuickLines)
        self._summary: Json | None = None
        self._summary_modified = 0.0

    def refresh(self) -> int:
        """Read what is new, and return the version."""
        with self._lock:
            if self._live.refresh():
                self.version += 1
            self._read_summary()
            return self.version

    @property
    def _history(self) -> RunHistory:
        return self._live.history

    def _read_summary(self) -> None:
        path = self.folder / SUMMARY_FILE
        try:
            modified = path.stat().st_mtime
        except OSError:
            modified = 0.0
        if modified != self._summary_modified:
            self._summary_modified = modified
            self._summary = _read_json(path) if modified else None
            self.version += 1

    def state(self, until: float | None = None) -> Json:
        self.refresh()
        with self._lock:
            options = self.options()
            state = snapshot(self._figures(until), options, self._summary, time.time())
            if state["status"] == "empty" and self._is_new():
                state |= {"status": "starting", "doing": DOING["started"]}
            return {"run": self.name, "version": self.version, "problems": self._problems(), **state}

    def _figures(self, until: float | None) -> RunFigures:
        elastic = self._history.elastic or self.options().get("engine") in ("swarm", "bucket")
        return RunFigures(self._history, until, elastic=elastic)

    def _is_new(self) -> bool:
        return time.time() - _last_write(self.folder) < SILENT_SECONDS

    def series(self, until: float | None, points: int, workers: set[int] | None) -> Json:
        self.refresh()
        with self._lock:
            return {"run": self.name, "version": self.version, **series(self._figures(until), points, workers)}

    def rounds(self, until: float | None, count: int, before: int | None = None) -> Json:
        """Return the last `count` rounds, or the last ones before round `before`."""
        self.refresh()
        with self._lock:
            selected = [
                round_ for round_ in self._history.rounds.until(until) if before is None or round_.sequence < before
            ]
            return {
                "run": self.name,
                "rounds": [round_json(round_) for round_ in selected[-count:]],
                "all": len(selected),
            }

    def config(self) -> Json:
        """Return the options as resolved when training started; before that, those of config.toml."""
        self.refresh()
        with self._lock:
            resolved = dict(self._history.resolved)
            return {"run": self.name, "resolved": bool(resolved), "options": resolved or self.options()}

    def options(self) -> Json:
        """Read config.toml by dotted key; empty if it cannot be read."""
        try:
            path = self.folder / RUN_FILE
            if path.stat().st_size > _MOST_FILE_BYTES:
                return {}
            return dict(_flat(tomllib.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError):
            return {}

    def brief(self, *, read: bool = True) -> Json:
        """Return a line of the list of runs, from the summary of a run that has ended, else from its log.

        `read`: read what is new in the log; without it the line says what was read before.
        """
        options = self.options()
        about = {
            key: options.get(key) for key in ("model.name", "mode", "engine", "sync.num_inner_steps", "sync.codec")
        }
        with self._lock:
            self._read_summary()
            summary = self._summary
        if summary is None and read:
            self.refresh()
        with self._lock:
            state = _from_summary(summary) if summary is not None else self._from_log(options)
        last_time = _last_write(self.folder)
        return {"run": self.name, "last_time": last_time, "steps": options.get("steps"), "about": about, **state}

    def _from_log(self, options: Json) -> Json:
        state = snapshot(self._figures(None), options, None, time.time())
        if not self._history.events:  # not read yet, or there is nothing to read
            state["status"] = "starting" if self._is_new() else "silent"
        validation = state["validation"] or {}
        return {
            "status": state["status"],
            "step": state["step"] if self._history.events else None,
            "workers": state["health"]["present"] or len(state["workers"]) or None,
            "loss": validation.get("loss"),
            "perplexity": validation.get("perplexity"),
            "rounds": state["rounds"]["merged"],
            "bytes": state["communication"]["bytes_sent_per_worker"],
            "tokens": state["tokens"] if state["run_tokens"] is None else state["run_tokens"],
        }

    def _problems(self) -> list[str]:
        """List what a reader of the page should know about the log."""
        problems = []
        if self._live.reader.newest_version > EVENTS_VERSION:
            problems.append(
                f"A newer diloco wrote this run (events of version {self._live.reader.newest_version}; this one knows "
                f"{EVENTS_VERSION}): what it does not know is left out. Update diloco."
            )
        if self._live.reader.damaged_lines:
            problems.append(f"{self._live.reader.damaged_lines} damaged lines of {EVENTS_FILE} are left out.")
        if self._history.refused_events:
            problems.append(f"{self._history.refused_events} events have unknown fields and are left out.")
        if not self.folder.exists():
            problems.append("The folder of this run is gone: this is what was read before.")
        elif not self._live.reader.path.exists() and self._history.events:
            problems.append(f"{EVENTS_FILE} of this run is gone: this is what was read before.")
        elif not self._live.reader.path.exists():
            if not self._is_new():
                problems.append(f"There is no {EVENTS_FILE} yet: the run has not started to train.")
        elif self._live.reader.problem is not None:
            problems.append(f"{EVENTS_FILE} cannot be read: {self._live.reader.problem}.")
        return problems


def _from_summary(summary: Json) -> Json:
    return {
        "status": summary.get("status"),
        "step": summary.get("inner_steps"),
        "workers": summary.get("workers"),
        "loss": summary.get("validation_loss"),
        "perplexity": summary.get("validation_perplexity"),
        "rounds": summary.get("rounds"),
        "bytes": summary.get("bytes_sent_per_worker"),
        "tokens": summary.get("tokens"),
    }


class RunFolder:
    """All runs below a folder, or the folder itself if it is a run. New runs are found at every call of `find`."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            problem = "it is a file" if root.exists() else "there is no such folder"
            raise ConfigError(
                f"{root} is not a run folder, nor a folder of runs: {problem}. "
                "`diloco train` prints the run folder; the default is the folder `runs` in the current one"
            )
        self.root = root
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        if not self.find():
            raise ConfigError(
                f"{root} is not a run folder, nor a folder of runs: no folder in it has {EVENTS_FILE} or {RUN_FILE}"
            )

    def find(self) -> dict[str, Run]:
        """Find the runs by name, newest first; those whose folder is gone are left out."""
        with self._lock:
            runs = {}
            for folder, name in _run_folders(self.root):
                runs[name] = self._runs.get(name) or Run(folder, name)
            self._runs |= runs
            return dict(sorted(runs.items(), key=lambda item: -_last_write(item[1].folder)))

    def run(self, name: str) -> Run | None:
        """Return a run that `find` finds now or has found: a name in a request is never made into a path."""
        return self._runs.get(name) or self.find().get(name)


def _run_folders(root: Path) -> list[tuple[Path, str]]:
    if _is_run(root):
        return [(root, _readable(root.resolve().name or "run"))]
    found = _find_run_folders(root, _DEEPEST, set())
    folders = [(folder, _readable(str(folder.relative_to(root)))) for folder in found]
    return sorted(folders, key=lambda item: -_last_write(item[0]))[:_MOST_RUNS]


def _find_run_folders(folder: Path, depth: int, visited: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the run folders below `folder`, at most `depth` levels down; each once, though links may lead to it too."""
    try:
        children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return
    for child in sorted(children, key=lambda path: (path.is_symlink(), path)):
        identity = _device_and_inode(child)
        if identity is None or identity in visited or len(visited) >= _MOST_FOLDERS:
            continue
        visited.add(identity)
        if _is_run(child):
            yield child
        elif depth > 1:
            yield from _find_run_folders(child, depth - 1, visited)


def _device_and_inode(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _readable(name: str) -> str:
    """Escape the bytes of a name that are not UTF-8, and its control characters."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in name)


def _is_run(folder: Path) -> bool:
    return (folder / EVENTS_FILE).is_file() or (folder / RUN_FILE).is_file()


def _last_write(folder: Path) -> float:
    """Return when the log was last written, else config.toml; 0 without both."""
    for name in (EVENTS_FILE, RUN_FILE):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _read_json(path: Path) -> Json | None:
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            return None
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _flat(table: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str | int | float | bool) else str(value)


class QuickLines:
    """Decodes the lines of one log, in their order: several times as fast as json, and large fields only once."""

    def __init__(self) -> None:
        self._decoded_rounds: set[bytes] = set()  # numbers of the rounds whose large fields have been decoded

    def __call__(self, line: bytes) -> Any:
        """Decode a line, without the large fields that an earlier line of the same round has."""
        try:
            decoded = self._decode(line)
        except msgspec.DecodeError:  # perhaps NaN, which is no JSON
            return decode_line(line)
        if isinstance(decoded, dict) and decoded.get("type") == "resumed":  # rounds may be repeated
            self._decoded_rounds.clear()
        return decoded

    def _decode(self, line: bytes) -> Any:
        if len(line) < _LONG_LINE:
            return _DECODER.decode(line)
        fields = _SHALLOW.decode(line)
        if bytes(fields.get("type", b"")) == b'"round"':
            sequence = bytes(fields.get("sequence", b""))
            if sequence in self._decoded_rounds:
                fields = {name: value for name, value in fields.items() if name not in _REPEATED_FIELDS}
            elif bytes(fields.get("members", b"[]")) != b"[]":
                self._decoded_rounds.add(sequence)
        return {name: _DECODER.decode(value) for name, value in fields.items()}
