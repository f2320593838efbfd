"""The kernels of a GPU give the bits of the tensor operations that they replace. Needs a CUDA device."""

from collections.abc import Sequence

import pytest
import torch

import diloco
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.floats import Float16
from diloco.codecs.registry import codec
from diloco.core import fragments
from diloco.core.digest import Digest, digest
from diloco.core.fragments import Fragment, PartLayout
from diloco.core.outer_optimizers import SGD, Nesterov, OuterOptimizer, SGDMomentum
from diloco.core.outer_step import outer_gradient
from diloco.models.native.head import next_token_loss
from diloco.outer.sending import take_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(1000, 999), (77,), (513, 512), (3,)]  # odd sizes: nothing is aligned
EVEN_SHAPES = [(1024, 1024), (512,), (256, 4096)]
LARGE_SHAPES = [(2100, 1999), (77,), (513, 512), (3,)]  # parts of full size, which is what one pass needs
LARGE_EVEN_SHAPES = [(2048, 2048), (512,), (256, 4096)]
OUTER: list[OuterOptimizer] = [SGD(0.7), SGDMomentum(0.7, 0.9), Nesterov(0.7, 0.9)]


def make(shapes: Sequence[tuple[int, ...]], outer: OuterOptimizer, *, offload: bool = False) -> Fragment:
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = [torch.nn.Parameter(torch.randn(shape, device="cuda", generator=generator) * 0.02) for shape in shapes]
    fragment = Fragment(tuple(map(str, range(len(shapes)))), tuple(tensors), outer, offload)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(torch.randn(tensor.shape, device="cuda", generator=generator), alpha=1e-3)
        for name, buffer in fragment.state.items():
            values = torch.randn(buffer.shape, device="cuda", generator=generator) * 0.01
            fragment.state[name].copy_(values)
    return fragment


def delta_of(fragment: Fragment) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.randn(fragment.numel, device="cuda", generator=generator) * 1e-3


def contents(fragment: Fragment) -> list[torch.Tensor]:
    return [
        fragment.anchor.cpu(),
        *(s.cpu() for s in fragment.state.values()),
        *(t.detach().cpu() for t in fragment.tensors),
    ]


def same(mine: Fragment, other: Fragment) -> bool:
    return all(torch.equal(a, b) for a, b in zip(contents(mine), contents(other), strict=True))


@pytest.mark.parametrize("outer", OUTER, ids=lambda outer: outer.name)
@pytest.mark.parametrize("mixing", [0.0, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("shapes", [SHAPES, EVEN_SHAPES], ids=["odd", "even"])
def test_a_step_in_one_pass_is_the_step_of_tensor_operations_bit_for_bit(
    outer: OuterOptimizer, mixing: float, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain, offloaded = make(shapes, outer), make(shapes, outer), make(shapes, outer, offload=True)
    delta = delta_of(fused)
    for fragment in (fused, offloaded):
        assert fragment.kernels is not None
        taken = Digest(fragment.device)
        take_step(fragment, fragment.outer_opt, lambda span: delta[span.slice].clone(), mixing, taken)
        assert taken.hexdigest() == digest(fragment.anchor.cpu())
    monkeypatch.setattr(Fragment, "kernels", None)
    take_step(plain, plain.outer_opt, lambda span: delta[span.slice].clone(), mixing)
    assert same(fused, plain)
    assert same(offloaded, plain)


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize(("outer", "mixing"), [*zip(OUTER, [0.0] * 3, strict=True), (OUTER[2], 0.3)])
@pytest.mark.parametrize("shapes", [LARGE_SHAPES, LARGE_EVEN_SHAPES], ids=["odd", "even"])
def test_encoding_and_stepping_in_one_pass_give_the_bits_of_many(
    name: str, outer: OuterOptimizer, mixing: float, shapes: list[tuple[int, ...]]
) -> None:
    from diloco.codecs.gradient_kernels import encode_gradient, kernels_for, step_with_mean

    fused, plain = make(shapes, outer), make(shapes, outer)
    mine, theirs = (EncodedVector(codec(name), fused.layout, "cuda") for _ in range(2))
    kernels = kernels_for(fused, mine)
    assert kernels is not None
    error, norm = encode_gradient(kernels, fused, mine).sqrt().tolist()
    delta = torch.cat([piece.clone() for _, piece in outer_gradient(plain)])
    theirs.encode(0, delta)
    assert torch.equal(mine.data, theirs.data)
    decoded = theirs.decode(0, plain.layout.num_parts)
    assert norm == pytest.approx(float(delta.norm()), rel=1e-5)
    assert error == pytest.approx(float((decoded - delta).norm()), rel=1e-4)
    taken = Digest(fused.device)
    mean_norm = float(step_with_mean(kernels, fused, mine, outer, mixing, taken).sqrt())
    assert mean_norm == pytest.approx(float(decoded.norm()), rel=1e-5)
    take_step(plain, plain.outer_opt, lambda span: decoded[span.slice].clone(), mixing)
    assert same(fused, plain)
    assert taken.hexdigest() == digest(plain.anchor)


def test_rounds_in_one_pass_leave_the_anchor_of_rounds_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> str:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2100, 1999), torch.nn.Linear(1999, 7)).cuda()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = diloco.DiLoCo(model, inner, diloco.alone(), sync=diloco.SyncConfig(1, "int8"))
        for _ in range(3):
            model(torch.ones(1, 2100, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.loop.replica.lanes[0].codec_errors[0]
        optimizer.finish()
        return optimizer.anchor_digest()

    fused = train()
    monkeypatch.setattr("diloco.outer.sending.kernels_in_one_pass", lambda *_: None)
    assert train() == fused


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("outer", OUTER, ids=lambda outer: outer.name)
def test_alone_a_worker_takes_the_step_along_its_own_outer_gradient(outer: OuterOptimizer, offload: bool) -> None:
    alone, two_passes = make(SHAPES, outer, offload=offload), make(SHAPES, outer)
    delta = torch.cat([piece.clone() for _, piece in outer_gradient(two_passes)])
    take_step(two_passes, two_passes.outer_opt, lambda span: delta[span.slice].clone())
    take_step(alone, alone.outer_opt, None)
    assert same(alone, two_passes)


def test_a_fragment_in_many_spans_is_one_in_a_single_span(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(SHAPES, OUTER[2])
    monkeypatch.setitem(fragments._SPAN_ELEMENTS, "cuda", 1 << 14)
    monkeypatch.setattr("diloco.core.offload.SPAN_ELEMENTS", 1 << 14)
    cut, offloaded = make(SHAPES, OUTER[2]), make(SHAPES, OUTER[2], offload=True)
    assert len(list(cut.spans())) > 50
    for fragment in (whole, cut, offloaded):
        delta = torch.cat([piece.clone() for _, piece in outer_gradient(fragment)])
        take_step(fragment, fragment.outer_opt, lambda span, delta=delta: delta[span.slice].clone())  # type: ignore[misc]
    assert same(cut, whole)
    assert same(offloaded, whole)


def test_a_parameter_that_got_other_memory_is_found_again() -> None:
    fragment, reference = make(SHAPES, OUTER[2]), make(SHAPES, OUTER[2])
    assert fragment.kernels is not None
    tensor = fragment.tensors[0]
    tensor.data = tensor.data.clone()
    take_step(fragment, fragment.outer_opt, None)
    take_step(reference, reference.outer_opt, None)
    assert same(fragment, reference)


def test_an_evaluation_with_offloaded_anchors_leaves_everything_as_it_was() -> None:
    fragment = make(SHAPES, OUTER[2], offload=True)
    before = [tensor.clone() for tensor in contents(fragment)]
    fragment.exchange()
    assert torch.equal(torch.cat([t.detach().flatten().cpu() for t in fragment.tensors]), before[0])
    fragment.exchange()
    assert all(torch.equal(a, b) for a, b in zip(contents(fragment), before, strict=True))


def test_a_vector_in_pinned_memory_holds_the_bytes_of_one_on_the_gpu() -> None:
    layout = PartLayout(200_000)
    values = torch.randn(layout.numel, device="cuda")
    there = EncodedVector(Float16(), layout, "cuda")
    here = EncodedVector(Float16(), layout, "cpu", pinned=True)
    for vector in (there, here):
        vector.encode(0, values)
    torch.cuda.synchronize()
    assert torch.equal(there.data.cpu(), here.data)
    decoded = here.decode(0, layout.num_parts, torch.device("cuda"))
    assert torch.equal(decoded, there.decode(0, layout.num_parts))


def test_a_digest_does_not_depend_on_the_device() -> None:
    for size in (1, 1023, 1024, 5000, 40_000_001):
        values = torch.randn(size)
        assert digest(values.cuda()) == digest(values)


@pytest.mark.parametrize("rows", [100, 20_000])
def test_the_fused_loss_and_its_gradients_are_those_of_cross_entropy(rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    matrix = torch.nn.Parameter(torch.randn(5003, 64, device="cuda") * 0.2)
    targets = torch.randint(0, 5003, (rows,), device="cuda")
    (3 * next_token_loss(hidden, matrix, targets)).backward()
    mine = hidden.grad.float(), matrix.grad.clone()
    hidden.grad = matrix.grad = None
    logits = torch.nn.functional.linear(hidden, matrix.bfloat16())
    loss = torch.nn.functional.cross_entropy(logits.float(), targets)
    (3 * loss).backward()
    expected = float(loss.detach())
    theirs = hidden.grad.float(), matrix.grad
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.01
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert float(next_token_loss(hidden, matrix, targets)) == pytest.approx(expected, rel=1e-4)
    assert float(next_token_loss(hidden, matrix, targets).detach()) == pytest.approx(expected, rel=1e-4)
