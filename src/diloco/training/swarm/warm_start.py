"""A joiner waits until the warm start of a swarm is over, and says so.

The wait itself is the engine's, which asks for the state until there is one, and gives up if no member is left that
could have it. This comes first: it follows how far the member is that trains the warm start.
"""

import time
from collections.abc import Callable

from diloco.engines.swarm.node.status import RunStatus

_POLL_SECONDS = 0.2
_TELL_SECONDS = 60.0


def wait_for_warm_start(status: Callable[[], RunStatus], steps: int, emit: Callable[..., None]) -> None:
    """Until a live member with the state is past the warm start's `steps`, or none is left that has it."""
    told = time.monotonic() - _TELL_SECONDS
    while True:
        positions = [one.position for one in status().members if one.live and one.has_state]
        if not positions or max(positions) >= steps:
            return
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            emit("warm_start", step=max(positions), steps=steps)
        time.sleep(_POLL_SECONDS)
