"""Measuring, for all benchmarks: this process's memory and sent bytes, the machine in words, results as JSON.

A result file has `code` (version of the package, commit), `date`, `machine` and `results`.

Linux only: memory is VmHWM of /proc/self/status, the kernel's own high-water mark, reset through
/proc/self/clear_refs; bytes are `tcpi_bytes_sent` less `tcpi_bytes_retrans` of TCP_INFO, summed over the process's own
TCP sockets, so that framing, coordination and payload count alike for every sender. A machine is named by its
processor, never by its host.
"""

import ctypes
import gc
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_BYTES_SENT_OFFSET = 200  # of the u64s tcpi_bytes_sent, tcpi_bytes_retrans in struct tcp_info (linux/tcp.h, from 4.19)


def reset_peak_memory() -> int:
    """Give free memory back to the system, forget the high-water mark, return the resident bytes of now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_memory() -> int:
    """Return the most resident bytes since `reset_peak_memory`."""
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: these benchmarks need Linux")


def socket_bytes_sent() -> int:
    """Count the bytes sent so far on all open TCP sockets of this process, each once however often TCP repeated it."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if connection.type & socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    bytes_sent, retransmitted = struct.unpack_from("=QQ", info, _BYTES_SENT_OFFSET)
                    total += bytes_sent - retransmitted
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return total


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))


def check_cuda(remedy: str) -> None:
    """End the benchmark with a sentence if torch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"error: this measures on a GPU, and torch finds no CUDA device on this machine: {remedy}")


def machine() -> dict[str, object]:
    """Describe the machine in words that say nothing of its owner."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def results_path(benchmark: str, device: str | None = None) -> Path:
    """Return benchmarks/results/<benchmark>-<processor or device>-….json."""
    all_words = "".join(letter if letter.isalnum() else " " for letter in (device or _processor()).lower()).split()
    name_words = [word for word in all_words if word not in ("r", "tm", "cpu", "processor")]
    return RESULTS / f"{benchmark}-{'-'.join(name_words)}{'' if device else f'-{os.cpu_count()}-cores'}.json"


def code_version() -> dict[str, object]:
    """Return the package's version and the commit that is measured; `changed`: with files that are not committed."""
    from diloco.version import __version__

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(RESULTS.parent), *command], check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--", "../src", "*.py"))
        return {"version": __version__, "commit": git("rev-parse", "--short=12", "HEAD"), "changed": changed}
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(
            "error: a result file names the commit that was measured, and git does not know it here: run benchmarks in "
            "a clone"
        ) from None


def write_results(benchmark: str, results: object, *, device: str | None = None) -> Path:
    """Write the result file of this benchmark and machine, in place of that of an earlier run."""
    path = results_path(benchmark, device)
    path.parent.mkdir(exist_ok=True)
    machine_facts = machine() | ({} if device is None else {"device": device})
    content = {"code": code_version(), "date": date.today().isoformat(), "machine": machine_facts, "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
