"""The small files in RUN/swarm: their names, and writing them so that only their owner may read them. Torch-free.

Several processes of one machine write to the folder; every write is atomic, and none waits for a lock.
"""

from pathlib import Path

from diloco.atomic_files import PRIVATE, append_file, write_file

SWARM_FOLDER = "swarm"
RUN_KEY_FILE = "run.key"
"""The run's private key; only on the machine that founded the run."""
INVITATION_FILES = "*.invitation"
"""The invitations with which this machine's workers joined, one each."""
PEERS_FILE = "peers.json"
REVOCATIONS_FILE = "revocations.txt"
"""Signed records, one per line."""


def invitation_file(name: str = "worker-0") -> str:
    """Return the file of the invitation with which the worker of this name joined."""
    return f"{name}.invitation"


def write_private(path: Path, text: str, *, new: bool = False) -> None:
    """Durable when this returns, readable by its owner only. `new`: raises FileExistsError if the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text, durable=True, mode=PRIVATE, overwrite=not new)


def append_line(path: Path, line: str) -> None:
    """Writes a newline first: a power cut may have left half a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_file(path, f"\n{line}\n".encode(), mode=PRIVATE)
