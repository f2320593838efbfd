"""How fast outer gradients are encoded and decoded: on one core, and on a GPU against its memory.

    CPU   GB of fp32 input a second, encoding and decoding it once, on one core; in spans as the outer loop has them
    GPU   the same in one call, and the share of the memory's bandwidth: bytes that must be read and written, at the
          rate at which the same run copies memory

    python benchmarks/codec_speed.py [--device cuda]

Targets: int8 and both 4-bit codecs at least 1.5 GB/s on one core, and with fp16 60 % of a GPU's bandwidth.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from diloco.codecs.base import Codec
from diloco.codecs.registry import CODECS, codec
from diloco.core.fragments import PartLayout, span_elements
from measuring import Spread, check_cuda, write_results

LEAST_CPU_GB = 1.5
LEAST_GPU_SHARE = 0.6
ON_CPU = ("int8", "int4", "e3m0")
ON_GPU = ("fp16", "int8", "int4", "e3m0")
"""The codecs with a target."""


@dataclass(frozen=True)
class Row:
    codec: str
    bytes_per_value: float
    encode_seconds: Spread
    decode_seconds: Spread
    gb_per_second: float
    """fp32 input encoded and decoded: on a GPU in the median, on the CPU at best, since others use its caches."""
    bandwidth_share: float | None = None


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> Spread:
    """Time some work. On a CPU these are the seconds in which this thread had the core, which others may use too."""
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    work()
    seconds = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        started = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    return Spread.of(seconds)


def measure(measured_codec: Codec, numel: int, device: torch.device, repeats: int, copy_rate: float | None) -> Row:
    """Measure a codec. `copy_rate`: bytes a second that this device reads and writes when it copies."""
    part_elements = PartLayout(numel).part_elements
    values = torch.randn(numel // part_elements, part_elements, device=device) * 1e-3
    data = torch.empty(len(values), measured_codec.part_bytes(part_elements), dtype=torch.uint8, device=device)
    out = torch.empty_like(values)
    step = max(1, (numel if device.type == "cuda" else span_elements(device)) // part_elements)
    spans = [slice(first, first + step) for first in range(0, len(values), step)]
    encode = timed(lambda: [measured_codec.encode(values[span], data[span]) for span in spans], device, repeats)
    decode = timed(lambda: [measured_codec.decode(data[span], out[span]) for span in spans], device, repeats)
    on_gpu = device.type == "cuda"
    seconds = encode.median + decode.median if on_gpu else encode.low + decode.low
    moved_bytes = 2 * (values.nbytes + data.nbytes)
    share = None if copy_rate is None else moved_bytes / seconds / copy_rate
    return Row(measured_codec.name, data.nbytes / values.numel(), encode, decode, values.nbytes / seconds / 1e9, share)


def copy_rate(device: torch.device) -> float:
    a, b = (torch.empty(1 << 29, device=device) for _ in range(2))
    return 2 * a.nbytes / timed(lambda: a.copy_(b), device, 20).median


def missed_targets(rows: list[Row], device: torch.device) -> list[str]:
    missed = []
    for row in rows:
        if device.type == "cpu" and row.codec in ON_CPU and row.gb_per_second < LEAST_CPU_GB:
            missed.append(f"{row.codec}: {row.gb_per_second:.2f} GB/s, below {LEAST_CPU_GB}")
        if row.bandwidth_share is not None and row.codec in ON_GPU and row.bandwidth_share < LEAST_GPU_SHARE:
            missed.append(f"{row.codec}: {row.bandwidth_share:.0%} of the bandwidth, below {LEAST_GPU_SHARE:.0%}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    options = parser.parse_args()
    if options.device == "cuda":
        check_cuda("use --device cpu")
    device = torch.device(options.device)
    torch.set_num_threads(1)
    on_gpu = device.type == "cuda"
    numel = 1 << 28 if on_gpu else 1 << 24
    copy_bytes_per_second = copy_rate(device) if on_gpu else None
    codecs_by_name = {
        variant.name: variant for name in options.codecs for variant in (codec(name), codec(name).for_means)
    }
    rows = [
        measure(variant, numel, device, options.repeats, copy_bytes_per_second) for variant in codecs_by_name.values()
    ]
    for row in rows:
        share = "" if row.bandwidth_share is None else f"  {row.bandwidth_share:5.0%} of the bandwidth"
        print(
            f"{row.codec:10} {row.bytes_per_value:6.3f} B/value  encode {row.encode_seconds.median * 1e3:8.2f} ms  "
            f"decode {row.decode_seconds.median * 1e3:8.2f} ms in the median  {row.gb_per_second:8.2f} GB/s{share}"
        )
    name = torch.cuda.get_device_name() if device.type == "cuda" else None
    results = {"values": numel, "copy_bytes_per_second": copy_bytes_per_second, "codecs": [asdict(row) for row in rows]}
    print(f"written: {write_results('codec-speed', results, device=name).name}")
    missed = missed_targets(rows, device)
    for target in missed:
        print(f"target missed: {target}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
