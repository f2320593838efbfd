"""What DiLoCo costs at a step without a round: DiLoCo.step against the inner optimizer's own step.

One worker takes the training steps of the `tiny` preset (forward, backward, AdamW, one torch thread). The cost is
measured in two ways, since it is far below what a machine's noise does to whole steps:

    direct    DiLoCo.step with an inner optimizer that does nothing, timed many times in a row, less the same
              do-nothing step called by itself: DiLoCo's own work, as a share of the median training step
    paired    whole training steps, by turns with inner.step and DiLoCo.step: the median of the pairs' differences, as
              a share of the median step; shown with its spread, not held to the target

Target: direct below 0.5 % of a training step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import diloco
from diloco.models.native.presets import preset
from diloco.models.native.transformer import Transformer
from measuring import Spread, write_results

MAX_SHARE = 0.005
BATCH = 8
CALLS = 2000


class Nothing(torch.optim.SGD):
    """An inner optimizer whose step is as good as free."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


def build(inner_of: Callable[[Any], torch.optim.Optimizer]) -> tuple[Transformer, diloco.DiLoCo]:
    torch.manual_seed(0)
    model = Transformer(preset("tiny"))
    sync = diloco.SyncConfig(num_inner_steps=10**9)
    return model, diloco.DiLoCo(model, inner_of(model.parameters()), diloco.alone(), sync=sync)


def seconds_a_call(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS


def own_seconds(repeats: int) -> Spread:
    """Measure DiLoCo's own work at one step."""
    _, optimizer = build(lambda parameters: Nothing(parameters, lr=0.1))
    return Spread.of([seconds_a_call(optimizer.step) - seconds_a_call(optimizer.inner.step) for _ in range(repeats)])


def training_seconds(pairs: int) -> tuple[Spread, Spread]:
    """Measure a training step with the inner optimizer alone, and how much longer the next one with DiLoCo took."""
    model, optimizer = build(lambda parameters: torch.optim.AdamW(parameters, lr=4e-4))
    length = model.config.max_sequence_length
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, length + 1))

    def step(last: Callable[[], object]) -> float:
        started = time.perf_counter()
        torch.autograd.backward(model.loss(tokens[:, :-1], tokens[:, 1:]))
        last()
        optimizer.zero_grad()
        return time.perf_counter() - started

    step(optimizer.step)
    alone = []
    extra = []
    for _ in range(pairs):
        alone.append(step(optimizer.inner.step))
        extra.append(step(optimizer.step) - alone[-1])
    return Spread.of(alone), quartiles(extra)


def quartiles(values: list[float]) -> Spread:
    """Return the middle half: single steps that the machine held up say nothing."""
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high, len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    own_work = own_seconds(5 if quick else 20)
    alone, extra = training_seconds(10 if quick else 60)
    table = Table(title=f"DiLoCo outside rounds, tiny preset, batch {BATCH}, one torch thread")
    for heading in ("", "median", "low", "high", "share of a training step"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, spread in (("training step", alone), ("DiLoCo, direct", own_work), ("DiLoCo, paired (quartiles)", extra)):
        numbers = [f"{value * 1e6:,.1f} µs" for value in (spread.median, spread.low, spread.high)]
        table.add_row(name, *numbers, f"{spread.median / alone.median:.3%}")
    Console(width=max(100, Console().width)).print(table)
    shares = {"direct_share": own_work.median / alone.median, "direct_share_high": own_work.high / alone.median}
    results = {"training_step": asdict(alone), "direct": asdict(own_work), "paired": asdict(extra), **shares}
    print(f"written: {write_results('bookkeeping', results).name}")
    if shares["direct_share"] >= MAX_SHARE:
        print(f"target missed: {shares['direct_share']:.3%} of a training step, not below {MAX_SHARE:.1%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
