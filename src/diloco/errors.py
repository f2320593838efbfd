"""Every error that diloco raises on purpose.

    DiLoCoError
    ├── ConfigError          the user asked for something impossible (also a ValueError); exit code 2
    │   └── DataError        a corpus, tokenizer or shard that cannot be used as asked
    │       └── SourceUnavailable  a source that may answer later: what was prepared of it is kept
    ├── EngineError          averaging with the others is impossible from here on
    │   └── RendezvousError  the workers did not come together
    │       └── Excluded     the others have no place for this worker: banned, revoked, of another model
    ├── CheckpointError      no checkpoint to go on from, or one that is damaged
    ├── RoundFailed          one round gave no mean; no anchor has changed and no local work is lost
    ├── SinkFailed           W&B, TensorBoard or trackio did not take all that `diloco sink` had for it
    └── WorkerFailed         a worker process died; carries its own traceback

A message names the thing, the value given, the rule, and the remedy. `assert` is for our own mistakes.
"""


def install_hint(extra: str) -> str:
    """The remedy where a package of an extra is missing."""
    return f"in a clone of diloco, pip install -c constraints.txt '.[{extra}]'"


class DiLoCoError(Exception):
    """The root: `except DiLoCoError` catches all of the above and nothing else."""


class ConfigError(DiLoCoError, ValueError):
    """A value the user gave breaks a rule; nothing has been started or written."""


class DataError(ConfigError):
    """The data cannot be used as asked: missing, unreadable, too small, shared between workers."""


class SourceUnavailable(DataError):
    """The source cannot be reached now (no network, say); a preparation goes on from where it was when it can."""


class EngineError(DiLoCoError):
    """The engine cannot go on: a member is gone for good, or the members do not belong together."""


class RendezvousError(EngineError):
    """The workers did not find each other: a port in use, a wrong address, a worker that never came."""


class Excluded(RendezvousError):
    """To ask again would be of no use: the others would say the same."""


class CheckpointError(DiLoCoError):
    """A saved state cannot be used: a file is missing, cut or changed, or it is of something else."""


class RoundFailed(DiLoCoError):
    """This round gave no mean. The worker keeps its anchor and its own parameters and may train on."""

    def __init__(self, reason: str, *, stopping: bool = False, resync: bool = True) -> None:
        """`stopping`: a worker asked for the end all the same. `resync`: the others may have gone on without us."""
        super().__init__(reason)
        self.reason, self.stopping, self.resync = reason, stopping, resync


class SinkFailed(DiLoCoError):
    """Some events could not be written to a sink; the run itself is not concerned."""


class WorkerFailed(DiLoCoError):
    """A worker process ended early; the message says which one and how, `output` is what it last wrote."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output
