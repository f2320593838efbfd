"""A summary of a round in which no field has its default."""

from diloco.engines.rounds import Comparison, RoundPhases, RoundSummary

FULL = RoundSummary(
    contributors=(0, 2),
    refused={1: "not finite"},
    clipped={2: "too long"},
    merge="clipped",
    plain=True,
    total_weight=2.5,
    bytes_sent=11,
    bytes_received=12,
    seconds=0.5,
    resync=True,
    roster=(0, 1, 2, 7),
    comparison=Comparison((1.0, -0.5, 2.0), (3, 0), 7),
    phases=RoundPhases(0.25, None, 0.125),
    signatures=3,
    mean_digest="0123456789abcdef",
)
