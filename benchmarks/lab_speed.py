"""How fast the laboratory computes k replicas on one device: milliseconds for an inner step of one replica.

Rounds are included (H = 30), evaluations and compiling are not. On a GPU: the two models of the target (4.3M and 13.8M
parameters, sequence 256) with 8 replicas, the small one also with more, stacked and one after another. On a CPU a model
of 0.1M. The text is made up: speed does not depend on it.

    python benchmarks/lab_speed.py [--device cuda] [--cases small medium] [--profile]
    python benchmarks/lab_speed.py --how func [--device cuda] [--scales cpu]

`--how func` compares two ways to compute a stack's forward pass, in turn in one process: the laboratory's own (Network
in lab/simulation/stacked.py), and the product's Decoder under torch.func. What follows is the same code in both: the
loss, the backward pass, clipping and AdamW. Its figures are inner steps of all replicas, without rounds: seconds of the
processor on a CPU, so that a busy machine does not count, and seconds on the clock on a GPU.

The results file also has figures of others (OTHERS below): EXO Gym's simulator with 3.1 to 4.9 ms (4.3M) and 13.4 ms
(13.8M), and plain compiled steps, one replica after another, with 7.3 and 9.0 ms. They were reported for an H200 when
this target was set; this script does not measure them.
"""

import argparse
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

import search_path  # noqa: F401  `support` of the tests
from diloco.data.corpus import Corpus
from diloco.engines.worker_ranks import ALONE
from diloco.lab.arm import Arm
from diloco.lab.scales import SCALES
from diloco.lab.simulation import stacked
from diloco.lab.simulation.batches import CorpusTokens
from diloco.lab.simulation.replicas import ReplicaTask, fresh, learning_rates
from diloco.lab.simulation.simulator import simulate
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import Decoder
from diloco.training.compute import Precision
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
STEPS_IN_TURN = 20
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
    """Print the kernels that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    steps = 0

    def on_progress(progress: Any) -> None:
        nonlocal steps
        steps = progress.step
        if steps == 5:
            torch.cuda.synchronize()
            profiler.start()
        if steps == 10:
            torch.cuda.synchronize()
            profiler.stop()

    profiler = torch_profile(activities=[ProfilerActivity.CUDA])
    simulate(arm_of(shape, k, 12), 0, corpus, device, how="stacked", on_progress=on_progress)
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=70))


# The product's model under torch.func, against the laboratory's own forward pass


def func_hidden(config: ModelConfig, device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Build `Network.hidden` from the product's Decoder, mapped over the replicas by torch.func.vmap."""
    layout = stacked.Layout(config)
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.reset_rotary(device)
    precision = Precision("auto", device, ALONE)
    starts = [start for start, _ in layout.places.values()]
    sizes = [stop - start for start, stop in pairwise([*starts, layout.numel])]  # the padding after a tensor included

    def of_one(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        hidden: Tensor = functional_call(decoder, parameters, (tokens,))
        return hidden

    def hidden(flat: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        pieces = zip(layout.places.items(), torch.split(flat, sizes, 1), strict=True)
        parameters = {
            name.removeprefix("model."): torch.unflatten(piece[:, : shape.numel()], 1, tuple(shape))
            for (name, (_, shape)), piece in pieces
        }
        head = parameters.pop("lm_head.weight", parameters["embed_tokens.weight"])
        with precision.autocast():
            states = vmap(of_one)(parameters, tokens).flatten(1, 2)
        return states, head.to(states.dtype)

    if device.type != "cuda":
        return hidden
    stacked.allow_many_shapes()
    compiled: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = torch.compile(hidden, dynamic=False, fullgraph=True)
    return compiled


def compare_with_func(scale_name: str, steps: int, folder: Path, device: torch.device) -> dict[str, Any]:
    """Measure an inner step of all replicas of a scale's DiLoCo arm, computed in both ways in turn."""
    scale = SCALES[scale_name]
    arm = scale.diloco()
    text = CorpusTokens(synthetic_corpus(folder / scale_name, scale.vocab_size, 2_000_000), device)
    config = arm.model_config(scale.vocab_size)
    windows = [
        text.windows(text.ranges(arm, worker), steps, arm.batch_size, arm.sequence_length, (0, worker))
        for worker in range(arm.workers)
    ]
    rates = learning_rates(arm.inner_config, 0, steps, steps, device)
    task = ReplicaTask(config, arm.inner_config, text, torch.from_numpy(np.stack(windows, 1)).to(device), rates)
    stacks = {way: stacked.Stacked(task, fresh(config, 0, device)) for way in ("own", "func")}
    for stack in stacks["func"].stacks:
        stack._hidden = func_hidden(config, device)
    if device.type == "cpu":
        torch.set_num_threads(scale.threads)
    seconds: dict[str, list[float]] = {way: [] for way in stacks}
    for number in range(steps // STEPS_IN_TURN):
        for way in sorted(stacks, reverse=bool(number % 2)):
            seconds[way].append(seconds_of_steps(stacks[way], device))
    own_seconds = statistics.median(seconds["own"][1:])  # the first turn compiles
    func_seconds = statistics.median(seconds["func"][1:])
    pairs = list(zip(seconds["own"], seconds["func"], strict=True))[1:]
    ratio = statistics.median(func_turn / own_turn for own_turn, func_turn in pairs)
    largest_difference = float((stacks["own"].losses - stacks["func"].losses).abs().max())
    print(
        f"{scale_name:7} k={arm.workers:3} own {1000 * own_seconds:7.3f} ms  func {1000 * func_seconds:7.3f} ms  "
        f"{ratio:.2f} times  losses at most {largest_difference:.2g} apart",
        flush=True,
    )
    return {
        "scale": scale_name, "replicas": arm.workers, "parameters": config.num_parameters(), "steps": steps,
        "own_milliseconds": 1000 * own_seconds, "func_milliseconds": 1000 * func_seconds, "times_as_long": ratio,
        "losses_apart": largest_difference,
    }  # fmt: skip


def seconds_of_steps(replicas: stacked.Stacked, device: torch.device) -> float:
    """Return the seconds of one of STEPS_IN_TURN steps of all replicas."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    for _ in range(STEPS_IN_TURN):
        replicas.take_step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - started) / STEPS_IN_TURN


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--steps", type=int, default=90, help="with --how func a multiple of 20")
    parser.add_argument("--rows", type=int, help="of logits at once")
    parser.add_argument("--profile", nargs="*", default=[], choices=SHAPES)
    parser.add_argument("--name", default="lab-speed", help="of the file of results")
    parser.add_argument("--how", choices=("own", "func"), default="own", help="func: against torch.func")
    parser.add_argument("--scales", nargs="+", choices=SCALES, help="with --how func: cpu; on a GPU gpu and 4m")
    options = parser.parse_args()
    if options.how == "func":
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # that is what is measured
        scales = options.scales or (["gpu", "4m"] if options.device == "cuda" else ["cpu"])
        device = torch.device(options.device)
        with tempfile.TemporaryDirectory() as folder:
            compared = [compare_with_func(scale, options.steps, Path(folder), device) for scale in scales]
        device_name = torch.cuda.get_device_name() if options.device == "cuda" else None
        print(f"written: {write_results(f'{options.name}-func', compared, device=device_name).name}")
        return 0
    if options.rows:
        stacked.ROWS_AT_ONCE = options.rows
    selected = options.cases or (["small", "medium", "many", "one"] if options.device == "cuda" else ["tiny"])
    results = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        corpora = {
            shape: synthetic_corpus(Path(folder) / shape, vocab_size, 2_000_000)
            for shape, (_, vocab_size, _, _) in SHAPES.items()
        }
        name = torch.cuda.get_device_name() if options.device == "cuda" else None
        for case in selected:
            for shape, k, how in CASES[case]:
                try:
                    results.append(measure(shape, k, how, options.steps, corpora[shape], options.device))
                    path = write_results(options.name, results, device=name)
                except Exception:  # noqa: BLE001 the other cases still count
                    traceback.print_exc()
                    failed = True
        for shape in options.profile:
            profile(shape, 8, corpora[shape], options.device)
    print(f"written: {path.name}" if results else "nothing was measured")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
