"""The small files in RUN/swarm, and how they are written: for their owner's eyes, and whole or not at all. Torch-free.

Several workers of one machine share the folder, each with a process that writes; nothing here waits for a lock.
"""

from pathlib import Path

from diloco.atomic_files import PRIVATE, append_file, write_file

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
    write_file(path, text, durable=True, mode=PRIVATE, overwrite=not new)


def append_line(path: Path, line: str) -> None:
    """Starts with a line end, since a power cut may have left half a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_file(path, f"\n{line}\n".encode(), mode=PRIVATE)
