"""The one clock of a node: its event loop's. Tests run the loop on a virtual clock."""

import asyncio


def now() -> float:
    """Return seconds since an arbitrary moment, as `loop.time()`; for time-outs and durations, not for dates."""
    return asyncio.get_running_loop().time()
