"""How much of its time a worker computes, at a rate of its link: the simple model behind plans and tables.

    a round of one fragment   transfer = bits / rate
    hidden behind computing   the backward pass of the step in which it begins, and `overlap_steps` whole steps
    not hidden                the rest; without overlap at least the first layer's share, which comes last in the
                              backward pass (of the one fragment that has it)
    utilisation               H · step / (H · step + what is not hidden, of all fragments)

Data-parallel training is H = 1. Latency, encoding and outer steps are left out.
"""

from dataclasses import dataclass
from math import log10

BACKWARD_SHARE = 2 / 3
"""Of an inner step: the backward pass takes twice as long as the forward pass."""


@dataclass(frozen=True)
class Exchange:
    """What a worker computes and sends between two averages of the whole model."""

    step_seconds: float
    bits: float
    """That a worker sends, and receives, for one average of all parameters."""
    num_inner_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0
    layers: int = 24

    def utilisation(self, bits_per_second: float) -> float:
        """The share of time spent on inner steps."""
        transfer = self.bits / self.fragments / bits_per_second
        hidden = (BACKWARD_SHARE + self.overlap_steps) * self.step_seconds
        first_layer = 0.0 if self.overlap_steps else self.bits / self.layers / bits_per_second
        waited = max(0.0, transfer - hidden)
        computed = self.num_inner_steps * self.step_seconds
        return computed / (computed + (self.fragments - 1) * waited + max(waited, first_layer))

    def bits_per_second(self, utilisation: float) -> float:
        """The slowest link that reaches a utilisation, to a thousandth."""
        low, high = 0.0, 16.0  # powers of ten
        while high - low > log10(1.001):
            middle = (low + high) / 2
            low, high = (low, middle) if self.utilisation(10**middle) >= utilisation else (middle, high)
        return float(10**high)
