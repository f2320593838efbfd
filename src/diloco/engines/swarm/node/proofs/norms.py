"""The norms of what arrives in a transfer: of parts against their sender's header, of a mean against all headers."""

import math

from diloco.codecs.base import Codec
from diloco.engines.swarm.node.plan import Plan


class NormCheck:
    """Of one transfer."""

    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._plan, self._codec = plan, codec
        self._squares = dict.fromkeys((entry.peer for entry in plan.contributors), 0.0)
        """Of the parts that have arrived from each contributor."""

    def add(self, squares: list[float]) -> tuple[str, str] | None:
        """More parts of each contributor. One that has sent more than the norm in its header, and the reason why."""
        for entry, square in zip(self._plan.contributors, squares, strict=True):
            claimed = entry.parsed.claim.norm
            total = self._squares[entry.peer] = self._squares[entry.peer] + square
            norm = math.sqrt(total) if math.isfinite(total) else math.inf
            if not norm <= claimed * self._codec.norm_slack:
                return entry.peer, f"its parts have the norm {norm:.3g}, it claimed {claimed:.3g}"
        return None

    def fault_of_mean(self, squares: float) -> str | None:
        """A mean is finite, and never longer than the longest contribution in it."""
        longest, slack = self._plan.longest, self._codec.norm_slack * self._codec.for_means.norm_slack
        if math.isfinite(squares) and math.sqrt(squares) <= longest * slack:
            return None
        return f"its part of the mean is longer than any contribution ({longest:.3g})"
