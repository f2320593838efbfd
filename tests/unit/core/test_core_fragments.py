"""Fragments: every element in exactly one, whatever the layout in memory; going through memory never changes a bit."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.core import fragments as module
from diloco.core.config import SyncConfig
from diloco.core.fragments import Fragment, PartLayout, assign, build_fragments, layout_digest
from diloco.core.outer_optimizers import SGD, Adam, Nesterov
from diloco.core.outer_step import outer_gradient, outer_step
from diloco.errors import ConfigError

NAMES = ["wte.weight", *[f"model.layers.{i}.{n}.weight" for i in range(6) for n in ("attn", "mlp")], "norm.weight"]


def mark(tensors: Iterable[Tensor]) -> None:
    """Every element a number of its own (small enough to be exact in bf16 is not needed: all are fp32 here)."""
    count = 0
    for tensor in tensors:
        with torch.no_grad():
            tensor.copy_(torch.arange(count, count + tensor.numel(), dtype=torch.float32).view(tensor.shape))
        count += tensor.numel()


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ([["a"]], r"in none: \['b'\]"),
        ([["a", "b"], ["b"]], r"in several: \['b'\]"),
        ([["a", "a", "b"]], r"in several: \['a'\]"),
        ([["a", "b", "c"]], r"not in the model: \['c'\]"),
    ],
)
def test_a_layout_that_forgets_doubles_or_invents_a_parameter_is_refused(
    groups: list[list[str]], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_fragments({"a": torch.ones(3), "b": torch.ones(2)}, groups, SGD())


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.zeros(3, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(0), "is empty"),
        (torch.zeros(1).expand(4), "shares or skips memory"),
        (torch.zeros(4, 4)[:, :2], "shares or skips memory"),
    ],
)
def test_a_tensor_that_cannot_be_averaged_is_refused_by_name(tensor: Tensor, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"'odd'.*{complaint}"):
        build_fragments({"odd": tensor}, [["odd"]], SGD())


def test_two_parameters_over_the_same_memory_are_refused() -> None:
    """Tied by their data instead of by the parameter: they would be stepped twice."""
    memory = torch.zeros(10)
    with pytest.raises(ConfigError, match=r"'a' and 'b' share memory"):
        build_fragments({"a": memory[:6], "b": memory[5:]}, [["a", "b"]], SGD())
    assert build_fragments({"a": memory[:5], "b": memory[5:]}, [["a", "b"]], SGD())[0].numel == 10


# Coverage and memory order


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_element_is_in_exactly_one_fragment(count: int) -> None:
    model = nn.Sequential(*[nn.Linear(70, 70) for _ in range(4)])
    parameters = dict(model.named_parameters())
    mark(parameters.values())
    built = build_fragments(parameters, assign(list(parameters), SyncConfig(fragments=count)), SGD())
    seen = torch.cat([fragment.anchor for fragment in built]).long()
    assert torch.equal(torch.bincount(seen), torch.ones(4 * 70 * 71, dtype=torch.int64))


def odd_tensors() -> dict[str, Tensor]:
    return {
        "channels_last": torch.empty(8, 3, 5, 5).to(memory_format=torch.channels_last),
        "transposed": torch.empty(40, 30).T,
        "permuted": torch.empty(4, 5, 6).permute(2, 0, 1),
        "size_one": torch.empty(3, 1, 7).transpose(0, 1),
        "depthwise": nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last).weight.detach(),
        "row_of_more": torch.empty(5, 9)[2:3],
        "scalar": torch.empty(()),
        "plain": torch.empty(1111),
    }


def test_weights_that_are_not_contiguous_are_read_and_written_in_place() -> None:
    tensors = odd_tensors()
    mark(tensors.values())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    (fragment,) = build_fragments(tensors, [list(tensors)], SGD())
    assert sorted(fragment.anchor.tolist()) == list(range(fragment.numel))
    fragment.anchor.add_(0.5)
    fragment.adopt_anchor()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name] + 0.5), name


def test_parameters_in_bf16_have_an_fp32_anchor_and_follow_it_rounded() -> None:
    parameter = torch.randn(500).to(torch.bfloat16)
    (fragment,) = build_fragments({"w": parameter}, [["w"]], SGD())
    assert fragment.anchor.dtype == torch.float32
    assert torch.equal(fragment.anchor, parameter.float())
    delta = torch.full((500,), 1e-4)
    outer_step(fragment, fragment.outer_opt, lambda span: delta[span.slice])
    assert torch.equal(parameter, fragment.anchor.to(torch.bfloat16))
    assert not torch.equal(parameter.float(), fragment.anchor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_exchanging_twice_restores_parameters_and_anchor_bit_for_bit(dtype: torch.dtype) -> None:
    parameter = torch.randn(3000).to(dtype).requires_grad_()
    (fragment,) = build_fragments({"w": parameter}, [["w"]], SGD())
    fragment.anchor.add_(torch.randn(3000) * 1e-3)
    own, anchor = parameter.detach().clone(), fragment.anchor.clone()
    fragment.exchange()
    assert torch.equal(parameter, anchor.to(dtype))
    fragment.exchange()
    assert torch.equal(parameter, own)
    assert torch.equal(fragment.anchor, anchor)


# Parts and spans


@given(st.integers(0, 50_000_000))
def test_parts_cover_a_fragment_with_less_than_one_part_of_padding(numel: int) -> None:
    layout = PartLayout(numel)
    assert layout.part_elements % module.PART_QUANTUM == 0
    padding = layout.num_parts * layout.part_elements - numel
    assert 0 <= padding < layout.part_elements or numel == padding == 0


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(1, 9000))
def test_spans_follow_one_another_at_part_boundaries_and_cover_everything(sizes: list[int], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SPAN_ELEMENTS", {"cpu": at_once})
        tensors = {str(i): torch.empty(size) for i, size in enumerate(sizes)}
        mark(tensors.values())
        (fragment,) = build_fragments(tensors, [list(tensors)], SGD())
        spans = list(fragment.spans())
        part = fragment.layout.part_elements
        assert [span.start for span in spans] == [0, *[span.stop for span in spans[:-1]]]
        assert spans[-1].stop == fragment.numel
        assert all(span.start == span.first_part * part for span in spans)
        assert sum(span.num_parts for span in spans) == fragment.layout.num_parts
        assert torch.equal(torch.cat([fragment.read(span).clone() for span in spans]), torch.arange(sum(sizes)).float())


def outer_steps(optimizer: Nesterov | Adam, mixing: float) -> tuple[list[Tensor], Fragment]:
    generator = torch.Generator().manual_seed(3)
    tensors = {str(i): torch.randn(size, generator=generator) for i, size in enumerate((1, 5000, 77, 2048, 3))}
    (fragment,) = build_fragments(tensors, [list(tensors)], optimizer)
    gradients = []
    for _ in range(3):
        for tensor in tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
        gradients.append(torch.cat([delta.clone() for _, delta in outer_gradient(fragment)]))
        mean = torch.randn(fragment.numel, generator=generator)
        outer_step(fragment, fragment.outer_opt, lambda span, mean=mean: mean[span.slice], mixing)
    return [*gradients, fragment.anchor, *tensors.values(), *fragment.state.values()], fragment


@pytest.mark.parametrize("optimizer", [Nesterov(), Adam()])
@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_the_size_of_a_span_never_changes_a_bit(
    optimizer: Nesterov | Adam, mixing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, whole = outer_steps(optimizer, mixing)
    assert len(list(whole.spans())) == 1
    for elements in (1024, 2048, 5000):
        monkeypatch.setattr(module, "_SPAN_ELEMENTS", {"cpu": elements})
        tensors, fragment = outer_steps(optimizer, mixing)
        assert len(list(fragment.spans())) > 1
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_an_outer_step_of_one_fragment_moves_no_other() -> None:
    tensors = {"a": torch.randn(50), "b": torch.randn(50)}
    first, second = build_fragments(tensors, [["a"], ["b"]], Nesterov())
    before = (second.anchor.clone(), tensors["b"].clone())
    outer_step(first, first.outer_opt, lambda span: torch.ones(50)[span.slice])
    assert torch.equal(second.anchor, before[0]) and torch.equal(tensors["b"], before[1])
    assert (first.rounds, second.rounds) == (1, 0)
    assert not second.state["momentum"].any()


def test_mixing_keeps_its_share_of_the_workers_own_parameters() -> None:
    own = torch.full((10,), 4.0)
    (fragment,) = build_fragments({"w": own}, [["w"]], SGD(lr=1.0))
    own.fill_(8.0)
    outer_step(fragment, fragment.outer_opt, lambda span: torch.full((10,), 2.0)[span.slice], mixing=0.25)
    assert torch.equal(fragment.anchor, torch.full((10,), 2.0))
    assert torch.equal(own, torch.full((10,), 0.25 * 8 + 0.75 * 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixing", [0.0, 0.3, 0.5])
def test_following_a_whole_anchor_at_once_gives_the_bits_of_following_it_span_by_span(
    dtype: torch.dtype, mixing: float
) -> None:
    torch.manual_seed(0)
    parameters = {
        "odd": nn.Parameter(torch.randn(1031, 3).to(dtype)),
        "transposed": nn.Parameter(torch.randn(129, 65).to(dtype).t()),
        "one": nn.Parameter(torch.randn(1).to(dtype)),
    }
    [fragment] = build_fragments(parameters, [list(parameters)], Nesterov())
    anchor, before = torch.randn(fragment.numel), torch.empty(fragment.numel)
    fragment.copy_to(before)
    with torch.no_grad():
        for span in fragment.spans():
            fragment.follow(span, anchor[span.slice], mixing)
    followed = [tensor.detach().clone() for tensor in fragment.tensors]
    fragment.follow_flat(before, 0.0)
    fragment.follow_flat(anchor, mixing)
    assert all(torch.equal(one, other) for one, other in zip(fragment.tensors, followed, strict=True))
    assert not torch.equal(fragment.tensors[0].float().flatten(), before[: 1031 * 3])


def test_the_layout_digest_tells_models_apart() -> None:
    def layout(tensors: dict[str, Tensor], *more: object) -> str:
        return layout_digest([f.tensors_by_name for f in build_fragments(tensors, [list(tensors)], SGD())], *more)

    layouts = [
        layout({"a": torch.zeros(2, 3)}),
        layout({"b": torch.zeros(2, 3)}),
        layout({"a": torch.zeros(3, 2)}),
        layout({"a": torch.zeros(3, 2).T}),
        layout({"a": torch.zeros(2, 3)}, "fp16"),
        layout({"a": torch.zeros(2, 3)}, "int8"),
    ]
    assert len(set(layouts)) == len(layouts)
    assert layout({"a": torch.ones(2, 3)}) == layouts[0]
