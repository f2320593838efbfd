"""RUN/swarm/peers.json: the peers that this machine's workers have met, and their addresses.

A restarted worker finds the swarm again by it. It is trusted for no more than that: a peer at such an address must
still show its credential.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from diloco.errors import ConfigError
from diloco.swarm import timing
from diloco.swarm.run_files import write_private

logger = logging.getLogger(__name__)

MAX_PEERS = 512
"""The file keeps those that were seen last."""


class KnownPeer(msgspec.Struct, frozen=True):
    peer: str
    worker: int | None
    """The peer's number in the swarm; None: it never had one."""
    addresses: tuple[str, ...]
    """Multiaddrs that end in /p2p/PEER, the best first."""
    invitation: str | None = None
    """The id of the invitation it came with, from Permissions.invitation_of; None: not known."""
    seen: float = 0.0
    """When it was last heard of, Unix time."""
    local_name: str | None = None
    """Settings.name, if it is one of this machine's own workers."""


class _Contents(msgspec.Struct):
    """The content of peers.json."""

    version: Literal[1]
    peers: list[KnownPeer]


def read_peers(path: Path) -> list[KnownPeer]:
    """Read the peers, the last seen first. A missing or damaged file gives an empty list: it is only a cache."""
    try:
        contents = msgspec.json.decode(path.read_bytes(), type=_Contents)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return sorted(contents.peers, key=lambda peer: -peer.seen)


def write_peers(path: Path, peers: Iterable[KnownPeer]) -> None:
    """Add these to the peers in the file, or replace them there."""
    merged = {peer.peer: peer for peer in read_peers(path)}
    for peer in peers:
        old = merged.get(peer.peer, peer)
        merged[peer.peer] = replace(
            peer,
            invitation=peer.invitation or old.invitation,
            local_name=peer.local_name or old.local_name,
        )
    newest = sorted(merged.values(), key=lambda peer: -peer.seen)[:MAX_PEERS]
    contents = msgspec.json.encode(_Contents(1, newest))
    write_private(path, msgspec.json.format(contents, indent=1).decode() + "\n")


class PeersFile:
    """Keeps peers.json up to date from an event loop. A thread writes it: a stalled disk never stops the loop."""

    def __init__(self, path: Path, on_written: Callable[[], object] = lambda: None) -> None:
        """`on_written` is called in that thread when the file has been written."""
        self._path = path
        self._on_written = on_written
        self._thread = ThreadPoolExecutor(1, "diloco-peers")
        self._saving: asyncio.Future[None] | None = None
        self._saved: list[KnownPeer] = []
        self._saved_at = -math.inf

    def save_if_due(self, peers: Sequence[KnownPeer]) -> None:
        """Write a change within 2 seconds and new times of `seen` within 20, if this is called every second."""
        changed = _without_times(peers) != _without_times(self._saved)
        due = self._saved_at + (timing.PEERS_CHANGED_SECONDS if changed else timing.PEERS_UNCHANGED_SECONDS)
        if (self._saving is None or self._saving.done()) and asyncio.get_running_loop().time() >= due:
            self._save(peers)

    async def save(self, peers: Sequence[KnownPeer], seconds: float) -> None:
        """Write the file now, and wait for the disk no longer than `seconds`."""
        await asyncio.wait([self._save(peers)], timeout=seconds)

    def _save(self, peers: Sequence[KnownPeer]) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        self._saved = list(peers)
        self._saved_at = loop.time()
        self._saving = loop.run_in_executor(self._thread, self._write, self._saved)
        return self._saving

    def _write(self, peers: list[KnownPeer]) -> None:
        try:
            write_peers(self._path, peers)
            self._on_written()
        except (OSError, ConfigError) as problem:
            logger.warning("the addresses of the other workers cannot be saved: %s", problem)


def _without_times(peers: Iterable[KnownPeer]) -> list[KnownPeer]:
    return [replace(peer, seen=0.0) for peer in peers]
