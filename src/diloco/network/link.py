"""The link model: how long a worker's bytes take on a described network. Numbers only, no torch."""

from dataclasses import dataclass

from diloco.errors import ConfigError

ROUND_LATENCIES = 2
"""One to the worker that reduces a part, one back with its mean."""


@dataclass(frozen=True)
class Link:
    """A worker's connection to the others: the same rate in both directions at once."""

    bits_per_second: float = 1e9
    latency_seconds: float = 0.0
    """One way."""

    def __post_init__(self) -> None:
        if not 0 < self.bits_per_second < float("inf"):
            raise ConfigError(f"bits_per_second = {self.bits_per_second} must be a finite number above 0")
        if not 0 <= self.latency_seconds < float("inf"):
            raise ConfigError(f"latency_seconds = {self.latency_seconds} must be a finite number of at least 0")

    def round_seconds(self, bytes_sent: int, bytes_received: int) -> float:
        """A reduce-scatter and an all-gather in which one worker sends and receives so many bytes."""
        return 8 * max(bytes_sent, bytes_received) / self.bits_per_second + ROUND_LATENCIES * self.latency_seconds
