"""Every codec has the same bytes on a GPU and on the CPU, and decodes them to the same values. Needs a CUDA device."""

import pytest
import torch

from diloco.codecs.base import Codec
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import CODECS, codec
from diloco.core.fragments import PartLayout, Span
from diloco.methods.error_feedback import ErrorFeedback

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EVERY: dict[str, Codec] = {one.name: one for name in CODECS for one in (codec(name), codec(name).for_means)}
every_codec = pytest.mark.parametrize("made", EVERY.values(), ids=EVERY.keys())


def check_same(made: Codec, values: torch.Tensor) -> None:
    rows, elements = values.shape
    on_cpu = torch.zeros(rows, made.part_bytes(elements), dtype=torch.uint8)
    on_gpu = torch.ones_like(on_cpu, device="cuda")
    made.encode(values, on_cpu)
    made.encode(values.cuda(), on_gpu)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    back, there = torch.empty_like(values), torch.empty_like(values, device="cuda")
    made.decode(on_cpu, back)
    made.decode(on_gpu, there)
    assert torch.equal(there.cpu().view(torch.int32), back.view(torch.int32))


@every_codec
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-42, 1e-38, 1e-20, 1e-3, 1.0, 3e38])
@pytest.mark.parametrize("elements", [1024, 5 * 1024, 64 * 1024])
def test_normal_values_of_any_size(made: Codec, scale: float, elements: int) -> None:
    values = torch.randn(7, elements, generator=torch.Generator().manual_seed(elements)).double() * scale
    check_same(made, values.clamp(-3.4e38, 3.4e38).float())


@every_codec
def test_every_kind_of_bit_pattern(made: Codec) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 4096), generator=torch.Generator().manual_seed(7))
    values = bits.to(torch.int32).view(torch.float32)
    check_same(made, torch.where(values.isfinite(), values, 0.0))


@every_codec
def test_ties_and_whole_steps(made: Codec) -> None:
    """Values on the edge between two codes, and many of the same size."""
    steps = torch.arange(-128, 128).repeat(32).view(2, 4096)
    for unit in (0.5, 1 / 7, 1 / 14, 1 / 127, 1 / 254, 0.75):
        check_same(made, steps * unit)
    check_same(made, (steps % 5 - 2) * 1.5)
    check_same(made, 2.0 ** (steps.float() / 16).round() * 1.5)


@every_codec
def test_outer_gradients_with_far_values(made: Codec) -> None:
    values = torch.randn(16, 32 * 1024, generator=torch.Generator().manual_seed(3)) * 1e-4
    values[:, ::97] *= 300
    check_same(made, values)


def test_error_feedback_leaves_the_same_error_on_both_devices() -> None:
    layout = PartLayout(300_000)
    whole = Span(0, layout.numel, 0, layout.num_parts)
    for name in ("topk", "2bit", "int4"):
        here, there = ErrorFeedback(layout.numel, 0.95, "cpu"), ErrorFeedback(layout.numel, 0.95, "cuda")
        for seed in range(3):
            delta = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))
            for feedback, device in ((here, "cpu"), (there, "cuda")):
                vector = EncodedVector(codec(name), layout, device)
                feedback.encode(vector, whole, delta.to(device))
                feedback.end_round(vector)
        assert torch.equal(there.error.cpu(), here.error)
