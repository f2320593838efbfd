"""How fast a worker takes inner steps on one GPU: tokens a second, the share of the matrix ceiling, memory.

The paper's 150M model (Table 1), sequence 1,024, bf16, AdamW, clipping, batches of 512 sequences in micro-batches, as
`diloco train --model 150m` computes them; beside it `LlamaForCausalLM` of transformers with the same shape, compiled,
on the same batches with the same optimizer. The ceiling is the best rate of one large bf16 matrix product in the same
run; a model's FLOPs are 6 a parameter and token (the output matrix included, the embedding lookup not) and the causal
half of the attention. Sides alternate, and the median of the repeats counts.

    python benchmarks/gpu_inner.py [--model 150m] [--micro-batch 64] [--accumulation 8] [--repeats 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.training.compute import prepare
from diloco.training.config.run import ComputeConfig, InnerConfig
from diloco.training.inner import inner_optimizer
from measuring import check_cuda, write_results

Loss = Callable[[Tensor, Tensor], Tensor]


def matrix_ceiling() -> float:
    """Measure the FLOP/s of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 20 * 2 * 8192**3 / (time.perf_counter() - started))
    return best


def flops_per_token(config: ModelConfig, parameters: int, sequence: int) -> float:
    embeddings = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * sequence
    return 6 * (parameters - embeddings) + attention


def ours(config: ModelConfig) -> tuple[nn.Module, Loss]:
    model = NativeModel(config).cuda()
    prepare(model, ComputeConfig(precision="bf16", compile=True), torch.device("cuda"))
    return model, model.loss


def theirs(config: ModelConfig) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    build: Any = LlamaForCausalLM
    shape: Any = LlamaConfig
    model: Any = build(shape(**config.hf_config(), attn_implementation="sdpa")).cuda()
    compiled: Any = torch.compile(model)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = compiled(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return model, loss


class Side:
    """A model in training."""

    def __init__(self, build: Callable[[ModelConfig], tuple[nn.Module, Loss]], config: ModelConfig) -> None:
        torch.manual_seed(0)
        self.model, self._loss = build(config)
        self._optimizer = inner_optimizer(self.model, InnerConfig())

    def step(self, micro_batches: Tensor) -> Tensor:
        loss = torch.zeros((), device="cuda")
        for tokens in micro_batches:
            with torch.autocast("cuda", torch.bfloat16):
                micro_loss = self._loss(tokens[:, :-1], tokens[:, 1:]) / len(micro_batches)
            micro_loss.backward()  # type: ignore[no-untyped-call]
            loss += micro_loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def seconds(self, batches: Tensor) -> float:
        """Return the seconds of one step."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for batch in batches:
            self.step(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / len(batches)


def measure(options: argparse.Namespace) -> dict[str, object]:
    config = preset(options.model)
    sequence = config.max_sequence_length
    shape = (options.steps, options.accumulation, options.micro_batch, sequence + 1)
    batches = torch.randint(0, config.vocab_size, shape, device="cuda")
    sides: dict[str, Side] = {}
    memory: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    for name, build in (("diloco", ours), ("transformers", theirs)):
        torch.cuda.empty_cache()
        allocated_before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        side = sides[name] = Side(build, config)
        for batch in batches:
            side.step(batch)
        memory[name] = torch.cuda.max_memory_allocated() - allocated_before
        times[name] = [side.seconds(batches)]
    ceilings = []
    for _ in range(options.repeats):
        ceilings.append(matrix_ceiling())
        for name, side in sides.items():
            times[name].append(side.seconds(batches))
    parameters = sum(p.numel() for p in sides["diloco"].model.parameters())
    assert parameters == sum(p.numel() for p in sides["transformers"].model.parameters())
    ceiling = max(ceilings)
    flops = flops_per_token(config, parameters, sequence)
    tokens = options.accumulation * options.micro_batch * sequence
    rates = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "model": options.model,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "micro_batch": options.micro_batch,
        "matrix_ceiling_tflops": ceiling / 1e12,
        "tokens_per_second": rates,
        "share_of_ceiling": {name: rate * flops / ceiling for name, rate in rates.items()},
        "peak_memory_gib": {name: value / 2**30 for name, value in memory.items()},
        "against_transformers": rates["diloco"] / rates["transformers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="150m")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    check_cuda("run it on one that has one")
    results = measure(options)
    for name, value in results.items():
        print(name, value)
    print(write_results("gpu-inner", results, device=torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
