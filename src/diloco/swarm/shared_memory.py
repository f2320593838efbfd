"""Memory that a trainer and its sidecar both see: a memfd, passed over the link as a file descriptor.

It has no name in the file system: the kernel frees it when both processes have let go of it, however they end. There
is no locking here; the messages on the link say which process may write.
"""

import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from pathlib import Path


class SharedMemory(mmap.mmap):
    """`num_bytes` bytes. Use `.view`: the mapping itself has at least one byte."""

    fd: int
    num_bytes: int

    def __new__(cls, fd: int, size: int) -> "SharedMemory":
        """Takes over the descriptor of a memfd that holds `size` bytes or more."""
        memory = super().__new__(cls, fd, max(size, 1))  # zero bytes cannot be mapped
        memory.fd = fd
        memory.num_bytes = size
        weakref.finalize(memory, os.close, fd)
        return memory

    @classmethod
    def create(cls, size: int) -> "SharedMemory":
        fd = os.memfd_create("diloco", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(size, 1))
            return cls(fd, size)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def on_disk(cls, folder: Path, size: int) -> "SharedMemory":
        """Map a file without a name, for what need not be in memory. Raises OSError if the disk has no room."""
        with tempfile.TemporaryFile(dir=folder, prefix="state-") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
            fd = os.dup(file.fileno())
        return cls(fd, size)

    @classmethod
    def copy_of(cls, data: bytes | memoryview, folder: Path | None = None) -> "SharedMemory":
        """`folder`: on the disk there, not in memory."""
        memory = cls.create(len(data)) if folder is None else cls.on_disk(folder, len(data))
        memory.view[:] = data
        return memory

    @property
    def view(self) -> memoryview:
        return memoryview(self)[: self.num_bytes]


class KeptMappings:
    """The mappings of memory that arrives again and again, so that its pages are brought in once, not in every round.

    The memory of a mapping stays while it is kept, also if the other process has let go of it: so they are few.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[int, int], SharedMemory] = OrderedDict()

    def mapping_of(self, memory: SharedMemory) -> SharedMemory:
        """Return the mapping of this memory that is kept; from now on `memory` itself if there is none."""
        key = (os.fstat(memory.fd).st_ino, memory.num_bytes)
        kept = self._kept.setdefault(key, memory)
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept
