"""What this machine has: memory that processes can still take, room on a disk. Torch-free."""

import os
import shutil
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that new processes can take without swapping, also within a container's limit; None if not known."""
    found = [_meminfo_available(), _container_available(Path("/sys/fs/cgroup"))]
    known = [size for size in found if size is not None]
    return min(known) if known else None


def resident_bytes() -> int:
    """The memory of this process; 0 where /proc does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_disk(folder: Path) -> int:
    """Bytes free where `folder` is, or will be."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(there).free


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder, which may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _container_available(cgroup: Path) -> int | None:
    """By the limits of control groups, version 2 or 1; file caches count as available."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most, now = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
            values = dict(line.split()[:2] for line in (cgroup / stat).read_text().splitlines())
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
        return most - now + int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return None
