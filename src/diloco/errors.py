"""Every error that diloco raises on purpose.

    DiLoCoError
    ├── ConfigError          the user asked for something impossible (also a ValueError); exit code 2
    │   └── DataError        a corpus, tokenizer or shard cannot be used as asked
    │       └── SourceUnavailable  a source that may answer later: what was prepared of it is kept
    ├── EngineError          averaging with the other workers is impossible from now on
    │   ├── RendezvousError  the workers did not find each other
    │   │   └── Excluded     the swarm refuses this worker: banned, revoked, or training another model
    │   └── RunComplete      the run has come to its end: there is nothing left to join
    ├── LossNotFinite        a worker's loss is nan or inf: training on is of no use
    ├── ModelNotWritten      training has ended, and the disk has no room for its model
    ├── CheckpointError      there is no checkpoint to resume from, or it is damaged
    ├── RoundFailed          one round gave no mean; no anchor has changed and no local work is lost
    ├── SinkFailed           `diloco sink` could not write all events to W&B, TensorBoard or trackio
    └── WorkerFailed         a worker process died; carries its last output

A message names the thing, the value given, the rule, and the remedy. `assert` is for our own mistakes.
"""

import errno
import shlex
import sys
from pathlib import Path

_CLONE = Path(__file__).parents[2]
"""Where pyproject.toml is, if this package is imported from a clone of the project."""


def install_hint(extra: str) -> str:
    """Return the remedy for a missing package of the extra `extra`, with this Python's pip: from the package index, or
    in a clone as `make` installs it."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if (_CLONE / "pyproject.toml").is_file() and (_CLONE / "constraints.txt").is_file():
        return f"in a clone of diloco, {pip} -c constraints.txt -e '.[{extra}]'"
    return f"{pip} 'diloco[{extra}]'"


class DiLoCoError(Exception):
    """The root: `except DiLoCoError` catches all of the above and nothing else."""


class ConfigError(DiLoCoError, ValueError):
    """A value the user gave breaks a rule; nothing has been started or written."""


class DataError(ConfigError):
    """The data cannot be used as asked: missing, unreadable, too small, shared between workers."""


class SourceUnavailable(DataError):
    """The source cannot be reached now (no network, say); the same preparation can continue later."""


class EngineError(DiLoCoError):
    """The engine cannot continue: a worker is gone for good, or the workers train different things."""


class RendezvousError(EngineError):
    """The workers did not find each other: a port in use, a wrong address, a worker that never came."""


class Excluded(RendezvousError):
    """The swarm refuses this worker for good; asking again would give the same answer."""


class RunComplete(EngineError):
    """The workers of this run have taken all its steps."""


class LossNotFinite(DiLoCoError):
    """The loss of a worker is nan or infinite. The last agreed parameters are from before."""


class ModelNotWritten(DiLoCoError):
    """All steps are taken, and the model cannot be written into the run folder."""


class CheckpointError(DiLoCoError):
    """A saved state cannot be used: a file is missing, cut or changed, or belongs to another run."""


class RoundFailed(DiLoCoError):
    """This round gave no mean. The worker keeps its anchor and its own parameters and may train on."""

    def __init__(
        self,
        reason: str,
        *,
        stopping: bool = False,
        resync: bool = True,
        silent: tuple[int, ...] = (),
        withheld: bool = False,
    ) -> None:
        """`stopping`: the workers end one turn after this round. `resync`: the others may have merged it.

        `silent`: the workers that posted nothing before the deadline. `withheld`: a state, before the first round,
        which is sound and not for others yet.
        """
        super().__init__(reason)
        self.reason = reason
        self.stopping = stopping
        self.resync = resync
        self.silent = silent
        self.withheld = withheld


class SinkFailed(DiLoCoError):
    """A sink could not be started, or events not be written to it; the run itself is not affected."""


class WorkerFailed(DiLoCoError):
    """A worker process ended early. The message says which one and how; `output` is the end of its output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def with_remedy(error: BaseException) -> str:
    """Put an error into words; if the machine has run out of something, with what to do about it."""
    words = f"{type(error).__name__}: {error}"[:200]
    if not isinstance(error, OSError):
        return words
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{words}: too few files may be open on this machine; start diloco after `ulimit -n 4096`"
    if error.errno == errno.ENOSPC:
        return f"{words}: the disk is full; make room"
    return words
