"""Ends a worker process at once. Torch-free."""

import os
import sys
from multiprocessing import util
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """Waits for no thread: one may still be in a collective that a lost peer never ends.

    Named semaphores of multiprocessing are given back first (tqdm makes one, for example): the launcher would otherwise
    report them as leaked.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a launcher without them has none to hand on
            stream.flush()
    util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(code)
