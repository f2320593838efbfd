"""Memory that a trainer and its sidecar both see: a memfd, handed over the link as a file descriptor.

It has no name in the file system, so nothing is left behind however the processes end; it goes when the last of them
has let go of it. Nothing here decides who may write when.
"""

import mmap
import os
import weakref


class SharedMemory(mmap.mmap):
    """`num_bytes` bytes, also through `memoryview(memory)`; of such a view, `.obj` is this again."""

    fd: int
    num_bytes: int

    def __new__(cls, fd: int, size: int) -> "SharedMemory":
        """Takes over the descriptor of a memfd that holds `size` bytes or more."""
        memory = super().__new__(cls, fd, max(size, 1))  # nothing cannot be mapped
        memory.fd, memory.num_bytes = fd, size
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

    @property
    def view(self) -> memoryview:
        return memoryview(self)[: self.num_bytes]


def shared(data: memoryview) -> SharedMemory:
    """The shared memory of which this is the view; a copy if it is of something else, or of a part only."""
    if isinstance(data.obj, SharedMemory) and data.obj.num_bytes == data.nbytes:
        return data.obj
    memory = SharedMemory.create(data.nbytes)
    memory.view[:] = data.cast("B")
    return memory
