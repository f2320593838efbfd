"""How fast the laboratory computes k replicas on one device: milliseconds for an inner step of one replica.

Rounds are included (H = 30), evaluations and compiling are not. On a GPU: the two models of the target (4.3M and 13.8M
parameters, sequence 256) with 8 replicas, the small one also with more, stacked and one after another. On a CPU a model
of 0.1M. The text is made up: speed does not depend on it.

    python benchmarks/lab_speed.py [--device cuda] [--cases small medium] [--profile]

The results file also has figures of others (OTHERS below): EXO Gym's simulator with 3.1 to 4.9 ms (4.3M) and 13.4 ms
(13.8M), and plain compiled steps, one replica after another, with 7.3 and 9.0 ms. They were reported for an H200 when
this target was set; this script does not measure them.
"""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import search_path  # noqa: F401  `support` of the tests
from diloco.data.corpus import Corpus
from diloco.lab.arm import Arm
from diloco.lab.simulation import stacked
from diloco.lab.simulation.simulator import simulate
from measuring import write_results
from support.synthetic_corpus import synthetic_corpus

SHAPES: dict[str, tuple[tuple[int, int, int, int], int, int, int]] = {
    "tiny": ((32, 96, 2, 16), 2048, 8, 32),
    "small": ((256, 704, 4, 64), 4096, 32, 256),
    "medium": ((384, 1024, 6, 64), 8192, 64, 256),
}
"""Width, feed-forward width, layers, head size; vocabulary, batch of a replica, sequence length."""
CASES = {
    "tiny": [("tiny", 4, "stacked"), ("tiny", 4, "sequential"), ("tiny", 16, "stacked")],
    "small": [("small", 8, "stacked"), ("small", 8, "sequential")],
    "medium": [("medium", 8, "stacked")],
    "many": [("small", 64, "stacked 8"), ("small", 16, "stacked 8"), ("small", 64, "stacked")],
    "one": [("small", 1, "stacked"), ("medium", 1, "stacked")],
}
TARGETS = {"small": 1.3, "medium": 5.0}
OTHERS = {"small": {"EXO Gym": [3.1, 4.9], "plain": 7.3}, "medium": {"EXO Gym": [13.4], "plain": 9.0}}


def arm_of(shape: str, k: int, steps: int) -> Arm:
    (width, wide, layers, head), vocab_size, batch, length = SHAPES[shape]
    model = {
        "vocab_size": vocab_size, "hidden_size": width, "intermediate_size": wide, "num_layers": layers,
        "num_heads": width // head, "num_kv_heads": width // head, "head_dim": head, "tie_embeddings": True,
    }  # fmt: skip
    return Arm(
        f"{shape}, {k} replicas", model=model, workers=k, steps=steps, batch_size=batch, sequence_length=length,
        inner={"lr": 1e-3, "warmup_steps": 30}, sync={"num_inner_steps": min(30, steps // 2), "codec": "fp16"},
        eval_points=1, eval_windows=16,
    )  # fmt: skip


def measure(shape: str, k: int, how: str, steps: int, corpus: Corpus, device: str) -> dict[str, Any]:
    started = time.monotonic()
    result = simulate(arm_of(shape, k, steps), 0, corpus, device, how=how)
    ms = 1000 * result.replica_step_seconds
    memory = None if result.memory_bytes is None else result.memory_bytes / 2**30
    print(
        f"{shape:7} k={k:3} {result.how:12} {ms:7.3f} ms a replica step (target {TARGETS.get(shape)})  "
        f"{memory or 0:.1f} GiB  whole {time.monotonic() - started:.0f} s  loss {result.loss:.3f}",
        flush=True,
    )
    return {
        "shape": shape, "replicas": k, "how": result.how, "parameters": result.parameters, "milliseconds": ms,
        "target": TARGETS.get(shape), "others": OTHERS.get(shape), "memory_gib": memory, "steps": steps,
        "rows": stacked.ROWS_AT_ONCE,
    }  # fmt: skip


def profile(shape: str, k: int, corpus: Corpus, device: str) -> None:
    """The kernels that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    steps = 0

    def after(progress: Any) -> None:
        nonlocal steps
        steps = progress.step
        if steps == 5:
            torch.cuda.synchronize()
            profiler.start()
        if steps == 10:
            torch.cuda.synchronize()
            profiler.stop()

    profiler = torch_profile(activities=[ProfilerActivity.CUDA])
    simulate(arm_of(shape, k, 12), 0, corpus, device, how="stacked", on_progress=after)
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=70))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rows", type=int, help="of logits at once")
    parser.add_argument("--profile", nargs="*", default=[], choices=SHAPES)
    parser.add_argument("--name", default="lab-speed", help="of the file of results")
    given = parser.parse_args()
    if given.rows:
        stacked.ROWS_AT_ONCE = given.rows
    chosen = given.cases or (["small", "medium", "many", "one"] if given.device == "cuda" else ["tiny"])
    results, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            shape: synthetic_corpus(Path(folder) / shape, vocab_size, 2_000_000)
            for shape, (_, vocab_size, _, _) in SHAPES.items()
        }
        name = torch.cuda.get_device_name() if given.device == "cuda" else None
        for case in chosen:
            for shape, k, how in CASES[case]:
                try:
                    results.append(measure(shape, k, how, given.steps, corpora[shape], given.device))
                    path = write_results(given.name, results, device=name)
                except Exception:  # noqa: BLE001 the other cases still count
                    traceback.print_exc()
                    failed = True
        for shape in given.profile:
            profile(shape, 8, corpora[shape], given.device)
    print(f"written: {path.name}" if results else "nothing was measured")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
