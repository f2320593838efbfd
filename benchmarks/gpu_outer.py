"""What an outer step costs on one GPU: time against the memory-bandwidth floor, and with anchors kept in CPU memory.

The parameters of OpenDiLoCo's 1.1B model. The floor of a step is θ_i, anchor and momentum read and written once each,
at the rate at which the same run copies memory. `naive` is the same step in tensor operations, tensor by tensor.
`exchanged` adds what averaging with others needs: the outer gradient encoded in a first pass, the mean decoded in a
second.
Offloaded, the floor is the transfer over PCIe, measured in the same run, and GPU memory is compared with plain AdamW
training of the same model (gradients and moments there, one step behind it).

    python benchmarks/gpu_outer.py [--model llama-1b]
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import diloco
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import Fragment
from diloco.core.outer_optimizers import Nesterov
from diloco.core.outer_step import outer_gradient
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.outer.sending import take_step
from measuring import check_cuda, write_results


def milliseconds(work: Callable[[], object], times: int = 5) -> float:
    work()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / times)
    return best * 1e3


def copy_milliseconds(numel: int) -> float:
    """Measure the time to read and write so many fp32 elements once."""
    a, b = (torch.empty(numel, device="cuda") for _ in range(2))
    return milliseconds(lambda: a.copy_(b))


def naive(fragment: Fragment, lr: float = 0.7, mu: float = 0.9) -> None:
    with torch.no_grad():
        for tensor, anchor, momentum in pieces(fragment):
            delta = anchor - tensor
            momentum.mul_(mu).add_(delta)
            step = delta + mu * momentum
            anchor.sub_(lr * step)
            tensor.copy_(anchor)


def pieces(fragment: Fragment) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    anchors = fragment.views(fragment.anchor)
    momenta = fragment.views(fragment.state["momentum"])
    for name, tensor in zip(fragment.names, fragment.tensors, strict=True):
        yield tensor, anchors[name], momenta[name]


class Exchange:
    """Both halves of an outer step, with the encoded bytes in between."""

    def __init__(self, fragment: Fragment, name: str, *, pinned: bool = False) -> None:
        self._fragment = fragment
        device = "cpu" if pinned else fragment.device
        self._vector = EncodedVector(codec(name), fragment.layout, device, pinned=pinned)

    def post(self) -> None:
        for span, delta in outer_gradient(self._fragment):
            self._vector.encode(span.first_part, delta)

    def merge(self) -> None:
        device = self._fragment.device
        take_step(
            self._fragment,
            self._fragment.outer_opt,
            lambda span: self._vector.decode(span.first_part, span.num_parts, device),
        )

    def both(self) -> None:
        self.post()
        self.merge()


def resident(model: NativeModel, floor: float) -> dict[str, object]:
    parameters_by_name = dict(model.named_parameters())
    fragment = Fragment(tuple(parameters_by_name), tuple(parameters_by_name.values()), Nesterov())
    one_pass = milliseconds(lambda: take_step(fragment, fragment.outer_opt, None))
    naive_ms = milliseconds(lambda: naive(fragment), 2)
    exchanged = {name: milliseconds(Exchange(fragment, name).both) for name in ("fp32", "fp16", "int8")}
    return {
        "floor_ms": floor,
        "one_pass_ms": one_pass,
        "one_pass_against_floor": one_pass / floor,
        "naive_ms": naive_ms,
        "naive_against_floor": naive_ms / floor,
        "exchanged_ms": exchanged,
        "exchanged_against_floor": {name: value / floor for name, value in exchanged.items()},
    }


def pcie_milliseconds_per_gib() -> tuple[float, float]:
    """Measure a transfer of 1 GiB to the GPU alone, and one in both directions at once."""
    host_source, host_target = (torch.empty(1 << 28, pin_memory=True) for _ in range(2))
    gpu_target, gpu_source = (torch.empty(1 << 28, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def both_ways() -> None:
        for stream, target, source in zip(streams, (gpu_target, host_target), (host_source, gpu_source), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return milliseconds(lambda: gpu_target.copy_(host_source, non_blocking=True), 3), milliseconds(both_ways, 3)


def offloaded(model: NativeModel) -> dict[str, object]:
    parameters_by_name = dict(model.named_parameters())
    numel = sum(tensor.numel() for tensor in parameters_by_name.values())
    one_way, both_ways = pcie_milliseconds_per_gib()
    fragment = Fragment(tuple(parameters_by_name), tuple(parameters_by_name.values()), Nesterov(), True)
    exchange = Exchange(fragment, "fp16", pinned=True)
    gib = numel * 4 / 2**30
    post = milliseconds(exchange.post, 2)
    merge = milliseconds(exchange.merge, 2)
    post_floor = 2 * gib * one_way  # anchor and momentum arrive
    merge_floor = 2.5 * gib * both_ways  # anchor, momentum and the mean arrive; anchor and momentum leave again
    return {
        "post_ms": post,
        "post_against_transfer": post / post_floor,
        "merge_ms": merge,
        "merge_against_transfer": merge / merge_floor,
    }


def built(name: str) -> NativeModel:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return NativeModel(preset(name))


def training_memory(name: str, *, offload: bool | None) -> int:
    """Measure the peak bytes of some steps with gradients and moments in place; `offload` None: plain training."""
    model = built(name)
    inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if offload is not None:
        sync = diloco.SyncConfig(num_inner_steps=2, offload=offload)
        inner = diloco.DiLoCo(model, inner, diloco.alone(), sync=sync)
    tokens = torch.randint(0, model.vocab_size, (4, 1025), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        inner.step()
        inner.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    del inner, model
    gc.collect()  # an optimizer and its engine know each other
    torch.cuda.empty_cache()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="llama-1b")
    name = parser.parse_args().model
    check_cuda("run it on one that has one")
    plain, with_diloco, with_offload = (training_memory(name, offload=offload) for offload in (None, False, True))
    model = built(name)
    parameters = sum(p.numel() for p in model.parameters())
    floor = 3 * copy_milliseconds(parameters)
    torch.cuda.empty_cache()
    results = {
        "model": name,
        "parameters": parameters,
        "copy_terabytes_per_second": 8 * parameters / (floor / 3e3) / 1e12,
        "resident": resident(model, floor),
        "offloaded": offloaded(model),
        "peak_memory_gib": {
            "plain": plain / 2**30,
            "diloco": with_diloco / 2**30,
            "diloco_offloaded": with_offload / 2**30,
        },
        "offloaded_memory_against_plain": with_offload / plain,
    }
    for key, value in results.items():
        print(key, value)
    print(write_results("gpu-outer", results, device=torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
