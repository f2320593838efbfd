"""Per-neuron pruning: the smallest values of each row go, wherever the row lies in a fragment's memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from diloco.core import fragments
from diloco.core.config import SyncConfig
from diloco.core.fragments import Fragment
from diloco.core.lanes import Piece
from diloco.core.outer_optimizers import SGD
from diloco.methods.pruning import prune_, pruned_gradient
from support.in_turn import InTurn
from support.problem import anchors


def test_each_row_loses_its_smallest_values() -> None:
    rows = torch.tensor([[1.0, -2.0, 3.0, -4.0], [40.0, 30.0, -20.0, 10.0]])
    prune_(rows, 0.5)
    assert rows.tolist() == [[0.0, 0.0, 3.0, -4.0], [40.0, 30.0, 0.0, 0.0]]


def test_a_fraction_of_less_than_one_value_prunes_nothing() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0]])
    prune_(rows, 0.3)
    assert rows.tolist() == [[1.0, 2.0, 3.0]]


def test_rows_are_those_of_the_tensors_also_across_spans_and_in_another_memory_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fragments._SPAN_ELEMENTS, "cpu", 1 << 17)
    generator = torch.Generator().manual_seed(0)
    shapes = [(700, 300), (90,), (8, 3, 5, 5)]
    tensors = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    tensors[2] = nn.Parameter(tensors[2].detach().to(memory_format=torch.channels_last))
    fragment = Fragment(("a", "b", "c"), tuple(tensors), SGD())
    before = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator))
    pieces = [Piece(name, tuple(t.shape), 0, t.numel()) for name, t in zip("abc", tensors, strict=True)]
    flat = torch.cat([delta.clone() for _, delta in pruned_gradient(fragment, pieces, 0.75)])
    assert len(list(fragment.spans())) > 1
    for old, new, pruned in zip(before, tensors, fragment.views(flat).values(), strict=True):
        delta = (old - new.detach()).reshape(len(old) if old.dim() > 1 else 1, -1)
        kept = pruned.reshape(delta.shape)
        count = delta.shape[1] - int(0.75 * delta.shape[1])
        assert bool(((kept != 0).sum(dim=1) == count).all())
        assert torch.equal(kept, torch.where(kept != 0, delta, 0.0))
        smallest_kept = torch.where(kept != 0, kept.abs(), torch.inf).amin(dim=1)
        assert bool((torch.where(kept == 0, delta.abs(), 0.0).amax(dim=1) <= smallest_kept).all())


def test_pruning_has_an_effect_on_a_worker_alone_with_fp32() -> None:
    """Whose outer gradient never leaves it otherwise."""
    ends = []
    for sync in (SyncConfig(2, "fp32"), replace(SyncConfig(2, "fp32"), prune=0.5)):
        world = InTurn(1, sync, SGD(lr=1.0))
        world.step(2)
        ends.append(anchors(world.optimizers[0]))
    assert not torch.equal(*ends)
