"""The small files in RUN/swarm, and how they are written: for their owner's eyes, and whole or not at all. Torch-free.

Several workers of one machine share the folder, each with a process that writes; nothing here waits for a lock.
"""

import os
import tempfile
from pathlib import Path

SWARM_FOLDER = "swarm"
RUN_KEY_FILE = "run.key"
"""The run's private key: only on the machine that founded the run."""
INVITATION_FILE = "invitation.txt"
"""The invitation that this machine's workers came with."""
PEERS_FILE = "peers.json"
REVOCATIONS_FILE = "revocations.txt"
"""Signed records, one a line."""


def write_private(path: Path, text: str, *, new: bool = False) -> None:
    """On the disk when this returns, readable by its owner only. `new`: raises FileExistsError if it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(draft, path)  # fails where `replace` would put an end to what is there
        else:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """In one write, which no other process gets into; a line end first, since a power cut may have left half a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        data = f"\n{line}\n".encode()
        if os.write(descriptor, data) != len(data):
            raise OSError(f"{path} could not be written whole: the disk is full?")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
