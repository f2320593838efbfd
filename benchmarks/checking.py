"""What it costs a worker of a swarm to check the others, beside what a round costs it anyway. CPU seconds, one thread.

python benchmarks/checking.py --elements 16777216 --workers 5

in the round     SHA-256 over the own contribution, over the parts that arrive, and over the mean
beside training  the numbers of the own contribution and of the mean, and how far they may differ
bytes            the numbers, to and from every other worker, as a share of the round's bytes
"""

import argparse
import hashlib
import time
from collections.abc import Callable

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.reduction import reduce_parts
from diloco.engines.swarm.node.proofs import merkle, projections
from diloco.engines.swarm.node.proofs.certificate import RangeDigest


def seconds(work: Callable[[], object]) -> float:
    work()
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--codecs", default="fp32,fp16,int8,int4,e3m0")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{given.elements / 1e6:.1f} million elements, {given.workers} workers")
    print(f"{'codec':6} {'MB':>6} {'encode':>8} {'reduce':>8} {'in round':>9} {'beside':>8} {'bytes':>8}")
    for name in given.codecs.split(","):
        print(*measure(name, given.elements, given.workers))


def measure(name: str, elements: int, workers: int) -> list[str]:
    used = codec(name)
    means = used.for_means
    vector = EncodedVector(used, PartLayout(elements))
    values = torch.randn(elements)
    encode = seconds(lambda: vector.encode(0, values))
    parts, width = vector.data.shape
    part = vector.layout.part_elements
    own = parts // workers
    mean = torch.empty(parts, means.part_bytes(part), dtype=torch.uint8)
    contributions = [vector.data[:own]] * workers
    reduce = seconds(lambda: reduce_parts(used, contributions, [1.0] * workers, part, mean[:own]))
    reduce_parts(used, [vector.data] * 2, [1.0] * 2, part, mean)
    sent, got = vector.data.view(-1).numpy().data, mean.view(-1).numpy().data
    share = sent[: own * width]
    sign = projections.signs(hashlib.sha256().digest(), part)
    in_round = (
        seconds(lambda: merkle.root(merkle.leaves(sent, width)))
        + (workers - 1) * seconds(lambda: merkle.leaves(share, width))
        + seconds(lambda: RangeDigest(len(got) // parts).add(got))
    )
    beside = seconds(lambda: projections.project(used, sent, parts, sign)) + seconds(
        lambda: projections.project_mean(means, got, parts, sign)
    )
    others = workers - 1
    traffic = 2 * others * own * (width + len(got) // parts)  # parts and means, there and back
    numbers = 2 * 4 * parts * others
    figures = [encode, reduce, in_round, beside]
    return [
        f"{name:6} {len(sent) / 1e6:6.1f}",
        *(f"{figure:{8 + (index == 2)}.3f}" for index, figure in enumerate(figures)),
        f"{numbers / traffic:8.3%}",
    ]


if __name__ == "__main__":
    main()
