"""One outer step on a CPU: alone, one pass does what two do; the digest is taken on the way."""

import pytest
import torch

import diloco
from diloco.core.digest import Digest, digest
from diloco.core.fragments import Fragment, build_fragments
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS
from diloco.core.outer_step import outer_gradient, outer_step
from diloco.errors import ConfigError


def make(outer: str) -> Fragment:
    generator = torch.Generator().manual_seed(0)
    tensors = {str(n): torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (1, 3000, 70_001)}
    [fragment] = build_fragments(tensors, [list(tensors)], OUTER_OPTIMIZERS[outer]())
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return fragment


@pytest.mark.parametrize("outer", OUTER_OPTIMIZERS)
@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_alone_one_pass_is_the_step_along_the_workers_own_outer_gradient(outer: str, mixing: float) -> None:
    once, twice = make(outer), make(outer)
    delta = torch.cat([piece.clone() for _, piece in outer_gradient(twice)])
    outer_step(twice, twice.outer_opt, lambda span: delta[span.slice].clone(), mixing)
    outer_step(once, once.outer_opt, None, mixing)
    assert torch.equal(once.anchor, twice.anchor)
    assert all(torch.equal(once.state[name], twice.state[name]) for name in once.state)
    assert all(torch.equal(a, b) for a, b in zip(once.tensors, twice.tensors, strict=True))


def test_the_digest_taken_on_the_way_is_that_of_the_new_anchor() -> None:
    fragment = make("nesterov")
    taken = Digest(fragment.device)
    outer_step(fragment, fragment.outer_opt, None, digest=taken)
    assert taken.hexdigest() == digest(fragment.anchor)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_a_worker_alone_that_sends_nothing_reports_the_norm_of_its_outer_gradient(codec: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = diloco.SyncConfig(num_inner_steps=2, codec=codec)  # type: ignore[arg-type]
    optimizer = diloco.DiLoCo(model, inner, diloco.alone(), sync=sync)
    events = []
    optimizer.loop.on_round = events.append
    for _ in range(4):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(events) == 2
    assert all(event.mean_norm == pytest.approx(event.norm, rel=1e-3) and event.norm > 0 for event in events)
    assert optimizer.loop.state.lanes[0].sending[0].vector.num_bytes == (0 if codec == "fp32" else 2 * 2 * 1024 + 8)


def test_offloading_from_a_cpu_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="on cpu"):
        diloco.DiLoCo(model, inner, diloco.alone(), sync=diloco.SyncConfig(offload=True))
