"""What a worker sends: bytes of a round, and how long they take at a rate."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.core.lanes import Shape
from diloco.engines.header import HEADER_BYTES
from diloco.engines.reduction import traffic
from diloco.errors import ConfigError
from diloco.training.config.run import RunConfig
from diloco.training.sizes.memory import encoded_vectors, moments_vectors

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
DAY_SECONDS = 86_400.0


def round_bytes(config: RunConfig, shapes: Mapping[str, Shape], workers: int) -> int:
    """Bytes that a worker sends until every fragment has been averaged once: every H inner steps, or at every step."""
    if workers == 1:
        return 0
    vectors, moments = encoded_vectors(config, shapes), moments_vectors(config, shapes)
    if config.sync.asynchronous and config.mode == "diloco":  # to worker 0, which sends anchors in fp32 back
        return sum(vector.num_bytes for vector in vectors) + HEADER_BYTES
    headers = (len(vectors) + len(moments)) * HEADER_BYTES * (workers - 1)
    return sum(_sent(vector, workers) for vector in vectors) + headers


def second_moment_bytes(config: RunConfig, shapes: Mapping[str, Shape], workers: int) -> int:
    """Bytes that a worker sends besides, in a round that averages second moments."""
    return 0 if workers == 1 else sum(_sent(vector, workers) for vector in moments_vectors(config, shapes))


def _sent(vector: EncodedVector, workers: int) -> int:
    return max(traffic(vector, workers, worker)[0] for worker in (0, workers - 1))


def warm_start_bytes(config: RunConfig, shapes: Mapping[str, Shape], workers: int) -> int:
    """Bytes that a worker sends in all steps of the warm start."""
    if workers == 1 or not config.sync.warm_start or config.engine == "swarm":  # a swarm's is one worker's alone
        return 0
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    vector = EncodedVector(codec(config.sync.gradient_codec), PartLayout(numel), torch.device("meta"))
    return config.sync.warm_start * (_sent(vector, workers) + HEADER_BYTES * (workers - 1))


def bits_per_second(text: str) -> float:
    """`100mbit`, `1 Gbit/s` or `800kbit` as bits per second."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s)?\s*", text.lower())
    if not found or not float(found[1]):
        raise ConfigError(f"--bandwidth {text}: give a number and a unit, such as 100mbit, 1gbit or 800kbit")
    return float(found[1]) * _BITS[found[2]]


def measured_bits_per_second(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The rate of a run's rounds so far, of the middle one; None if none has sent anything."""
    rates = sorted(8 * e["bytes_sent"] / e["seconds"] for e in _rounds(events) if e["bytes_sent"] > HEADER_BYTES * 64)
    return rates[len(rates) // 2] if rates else None


def measured_step_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of an inner step, rounds included, by the last logged step; None if none is logged."""
    steps = [event for event in events if event["type"] == "step" and event["elapsed_seconds"]]
    return steps[-1]["elapsed_seconds"] / steps[-1]["step"] if steps else None


def _rounds(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["type"] == "round" and event["seconds"]]
