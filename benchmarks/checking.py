"""What it costs a worker of a swarm to check the others: CPU time, bytes, and the share of a round's time.

    python benchmarks/checking.py                       everything, in some minutes; lines need root
    python benchmarks/checking.py --only cpu            one of cpu, loopback, 1000, 100 (a line's Mbit/s)

cpu: CPU seconds of one thread, beside what a round costs anyway.

    in the round     SHA-256 over the own contribution, over the parts that arrive, and over the mean
    beside training  the numbers of the own contribution and of the mean, and how far they may differ
    bytes            the numbers, to and from every other worker, as a share of the round's bytes

The others: rounds of real workers, which are trainers, sidecars and p2pds, without a model, from an outer gradient in
fp32 to the decoded mean. Every second round is one without checks (benchmarks/attacks/unchecked.py): no hash, signature
or norm, no copy of the contribution for others that check, and no check after the round. The difference of the medians
is by what checks delay a round; its share is told of the sync alone, and of a round with a minute of inner steps.
On the loopback device nothing waits for a line, and all workers share this machine's cores: the largest share there is.
CPU seconds are those of all processes of a worker, until the mean is checked.

Target: at most 5 % of a round's time and 1 % of its bytes.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from checking_rounds import Checked, checked_rounds
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.reduction import reduce_parts
from diloco.swarm.audit import merkle, projections
from diloco.swarm.protocol.certificate import RangeDigest
from measuring import results_path, write_results

LOOPBACK = "loopback"
LINES = ("1000", "100")
INNER_SECONDS = 60.0
MOST_TIME = 0.05
MOST_BYTES = 0.01
"""The targets: the share of a round's time and of its bytes."""


@dataclass(frozen=True)
class Work:
    """CPU seconds of one thread, for a vector of so many bytes."""

    codec: str
    num_bytes: int
    encode: float
    reduce: float
    in_round: float
    beside: float
    share_of_bytes: float


def seconds(work: Callable[[], object]) -> float:
    work()
    started = time.process_time()
    work()
    return time.process_time() - started


def measure_work(name: str, elements: int, workers: int) -> Work:
    codec_used = codec(name)
    means = codec_used.for_means
    vector = EncodedVector(codec_used, PartLayout(elements))
    values = torch.randn(elements)
    encode = seconds(lambda: vector.encode(0, values))
    parts, width = vector.data.shape
    part_elements = vector.layout.part_elements
    own_parts = parts // workers
    mean = torch.empty(parts, means.part_bytes(part_elements), dtype=torch.uint8)
    contributions = [vector.data[:own_parts]] * workers
    reduce = seconds(lambda: reduce_parts(codec_used, contributions, [1.0] * workers, part_elements, mean[:own_parts]))
    reduce_parts(codec_used, [vector.data] * 2, [1.0] * 2, part_elements, mean)
    sent_bytes = vector.data.view(-1).numpy().data
    mean_bytes = mean.view(-1).numpy().data
    own_share = sent_bytes[: own_parts * width]
    sign = projections.signs(hashlib.sha256().digest(), part_elements)
    in_round = (
        seconds(lambda: merkle.root(merkle.leaves(sent_bytes, width)))
        + (workers - 1) * seconds(lambda: merkle.leaves(own_share, width))
        + seconds(lambda: RangeDigest(len(mean_bytes) // parts).add(mean_bytes))
    )
    beside = seconds(lambda: projections.project(codec_used, sent_bytes, parts, sign)) + seconds(
        lambda: projections.project_mean(means, mean_bytes, parts, sign)
    )
    num_others = workers - 1
    traffic = 2 * num_others * own_parts * (width + len(mean_bytes) // parts)  # parts and means, there and back
    numbers_bytes = 2 * 4 * parts * num_others
    return Work(name, len(sent_bytes), encode, reduce, in_round, beside, numbers_bytes / traffic)


def show_work(rows: list[Work], elements: int, workers: int) -> None:
    print(f"{elements / 1e6:.1f} million elements, {workers} workers")
    print(f"{'codec':6} {'MB':>6} {'encode':>8} {'reduce':>8} {'in round':>9} {'beside':>8} {'bytes':>8}")
    for row in rows:
        print(
            f"{row.codec:6} {row.num_bytes / 1e6:6.1f} {row.encode:8.3f} {row.reduce:8.3f} {row.in_round:9.3f} "
            f"{row.beside:8.3f} {row.share_of_bytes:8.3%}"
        )


def show_rounds(rows: list[Checked], line: str) -> None:
    network = "the loopback device" if line == LOOPBACK else f"lines of {line} Mbit/s"
    print(f"rounds of {rows[0].workers} workers on {network}, {rows[0].elements / 1e6:g} million elements")
    print(f"{'codec':6} {'MB':>6} {'s':>6} {'without':>8} {'of sync':>8} {'of round':>9} {'CPU s':>6} {'without':>8}")
    for row in rows:
        print(
            f"{row.codec:6} {row.bytes_sent / 1e6:6.1f} {row.seconds.median:6.3f} {row.seconds_without.median:8.3f} "
            f"{row.share():8.1%} {row.share(INNER_SECONDS):9.2%} {row.cpu_seconds.median:6.3f} "
            f"{row.cpu_seconds_without.median:8.3f}"
        )


def above_target(results: dict[str, Any], rounds: dict[str, list[Checked]]) -> list[str]:
    above = [
        f"{row['codec']}: checking takes {row['share_of_bytes']:.2%} of the bytes"
        for row in results.get("cpu", ())
        if row["share_of_bytes"] > MOST_BYTES
    ]
    return above + [
        f"{line}, {row.codec}: checking takes {row.share(INNER_SECONDS):.1%} of a round"
        for line, rows in rounds.items()
        for row in rows
        if row.share(INNER_SECONDS) > MOST_TIME
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("cpu", LOOPBACK, *LINES), nargs="+", default=["cpu", LOOPBACK, *LINES])
    parser.add_argument("--elements", type=int, default=1 << 24, help="of cpu")
    parser.add_argument("--workers", type=int, default=5, help="of cpu")
    parser.add_argument("--codecs", default="fp32,fp16,int8,int4,e3m0", help="of cpu")
    parser.add_argument("--peers", type=int, default=2, help="workers of the rounds")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = results_path("checking")
    rounds: dict[str, list[Checked]] = {}
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    if "cpu" in options.only:
        work = [measure_work(name, options.elements, options.workers) for name in options.codecs.split(",")]
        show_work(work, options.elements, options.workers)
        results["cpu"] = [asdict(row) for row in work]
    for line in (selected for selected in options.only if selected != "cpu"):
        mbits = None if line == LOOPBACK else int(line)
        with tempfile.TemporaryDirectory() as folder:
            rounds[line] = checked_rounds(
                Path(folder), 50_000_000, options.peers, ["fp16", "int4"], options.repeats, mbits
            )
        show_rounds(rounds[line], line)
        shares = [{"of_sync": row.share(), "of_round": row.share(INNER_SECONDS)} for row in rounds[line]]
        results[line] = [asdict(row) | share for row, share in zip(rounds[line], shares, strict=True)]
    print(f"written: {write_results('checking', results).name}")
    missed = above_target(results, rounds)
    print("\n".join(missed) or "within the target")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
