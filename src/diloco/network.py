"""The model of time on a described network: how long a round takes, and how much of its time a worker computes.

    a round of one fragment   transfer = bits / rate
    hidden behind computing   the backward pass of the step in which it begins, and `overlap_steps` whole steps
    not hidden                the rest; without overlap at least the first layer's share, which comes last in the
                              backward pass (of the one fragment that has it)
    utilisation               H · step / (H · step + what is not hidden, of all fragments)

Data-parallel training is H = 1. The utilisation leaves latency, encoding and outer steps out. Numbers only, no torch.
"""

from dataclasses import dataclass
from math import log10

from diloco.errors import ConfigError

ROUND_LATENCIES = 2
"""One to the worker that reduces a part, one back with its mean."""
BACKWARD_SHARE = 2 / 3
"""The share of an inner step: the backward pass takes twice as long as the forward pass."""


@dataclass(frozen=True)
class NetworkLink:
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
        """Return the time of a reduce-scatter and an all-gather in which one worker sends and receives so many
        bytes."""
        return 8 * max(bytes_sent, bytes_received) / self.bits_per_second + ROUND_LATENCIES * self.latency_seconds


@dataclass(frozen=True)
class Exchange:
    """The computing and sending of a worker between two averages of the whole model."""

    step_seconds: float
    bits: float
    """What a worker sends, and receives, for one average of all parameters."""
    num_inner_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0
    layers: int = 24

    def utilisation(self, bits_per_second: float) -> float:
        """Return the share of time spent on inner steps."""
        transfer = self.bits / self.fragments / bits_per_second
        hidden = (BACKWARD_SHARE + self.overlap_steps) * self.step_seconds
        first_layer = 0.0 if self.overlap_steps else self.bits / self.layers / bits_per_second
        waited = max(0.0, transfer - hidden)
        computed = self.num_inner_steps * self.step_seconds
        return computed / (computed + (self.fragments - 1) * waited + max(waited, first_layer))

    def bits_per_second(self, utilisation: float) -> float:
        """Find the slowest link that reaches a utilisation, to a thousandth."""
        low, high = 0.0, 16.0  # powers of ten
        while high - low > log10(1.001):
            middle = (low + high) / 2
            low, high = (low, middle) if self.utilisation(10**middle) >= utilisation else (middle, high)
        return float(10**high)
