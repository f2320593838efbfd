"""Process groups of torch.distributed: made with a time limit, and ended together with their threads.

gloo runs collectives in threads of the group. When a collective is over, its thread may hold the last reference to a
tensor, and needs the interpreter's lock to drop it. If the interpreter is just ending, the whole process is aborted
(SIGABRT). So a group ends before the interpreter does: torch.distributed forgets it (`end_group`), every reference in
Python is dropped, and with the last one its destructor joins the threads.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_TAG_OF_NO_MESSAGE = 99


def new_group(ranks: Sequence[int], backend: str, timeout_seconds: float) -> "dist.ProcessGroup | None":
    """Make a group; None where this rank is not in it. Collective: all ranks make all groups in the same order."""
    group = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=timeout_seconds))
    return group if dist.get_rank() in ranks else None


def end_group(group: "dist.ProcessGroup | None", broken: bool = False) -> None:
    """Leave a group: whatever still waits in it gets an error now. The caller then drops its own reference.

    `broken`: its peers may be lost, so nothing of the backend's may wait for them.
    """
    if group is None:
        return
    _close_connections(group)
    if broken:
        with suppress(RuntimeError):  # gloo has no abort
            group.abort()
    with suppress(ValueError):  # torch.distributed was ended as a whole before
        dist.destroy_process_group(group)


def first_line(error: BaseException) -> str:
    """Return the first line of what torch.distributed says of a lost peer; a stack of C++ calls follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _close_connections(group: dist.ProcessGroup) -> None:
    """Let a receive time out: gloo then closes all connections of the group, and has no other way to do so."""
    if group.size() > 1:
        with suppress(RuntimeError):
            peer = (group.rank() + 1) % group.size()
            group.recv([torch.empty(1)], peer, _TAG_OF_NO_MESSAGE).wait(timedelta(milliseconds=1))
