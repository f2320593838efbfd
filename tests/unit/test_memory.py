"""Parameters, anchors and outer momentum of a large fragment lie in huge pages."""

import re
import sys
from pathlib import Path

import pytest
import torch

from diloco import memory
from diloco.core.fragments import build_fragments
from diloco.core.outer_optimizers import Nesterov
from diloco.memory import LARGE_BYTES, mapped, move_to_huge_pages, zeros


def flags_at(address: int) -> list[str]:
    """What the kernel says of the mapping that an address is in."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(place[1], 16) <= address < int(place[2], 16)
        elif within and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_anchor_and_momentum_of_a_large_fragment_ask_for_huge_pages() -> None:
    weight = torch.nn.Parameter(torch.randn(LARGE_BYTES // 4 + 3))
    [fragment] = build_fragments({"weight": weight}, [["weight"]], Nesterov())
    assert torch.equal(fragment.anchor, weight.detach())
    assert not fragment.state["momentum"].any()
    if sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").exists():
        for buffer in (fragment.anchor, fragment.state["momentum"]):
            assert "hg" in flags_at(buffer.data_ptr() + 2 * buffer.numel())


def test_parameters_of_a_large_fragment_move_to_huge_pages_and_keep_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved, really = [], memory._collapse
    monkeypatch.setattr(memory, "_collapse", lambda page: (moved.append(page), really(page)))
    weight, bias = torch.nn.Parameter(torch.randn(3 << 19)), torch.nn.Parameter(torch.randn(5))
    kept, address = weight.detach().clone(), weight.data_ptr()
    build_fragments({"weight": weight, "bias": bias}, [["weight", "bias"]], Nesterov())
    first, stop = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    whole = set(range(-(-first >> 21) << 21, (stop >> 21) << 21, 1 << 21))
    assert whole and whole <= set(moved)
    assert all(min(stop, page + (1 << 21)) - max(first, page) > 1 << 20 for page in moved)
    assert weight.data_ptr() == address and torch.equal(weight, kept)


def test_tensors_that_fill_little_of_a_huge_page_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(memory, "_collapse", moved.append)
    block = torch.zeros(3 << 21, dtype=torch.uint8)
    start = -block.data_ptr() % (1 << 21)
    page = block[start : start + (1 << 21)]
    move_to_huge_pages([page[: 1 << 19], page[-(1 << 19) :]])
    assert moved == []
    move_to_huge_pages([page[: 1 << 20], page[-(1 << 10) :]])
    assert moved == [page.data_ptr()]


def test_memory_of_any_size_is_zero() -> None:
    cpu = torch.device("cpu")
    for numel in (0, 1, LARGE_BYTES // 4):
        assert zeros(numel, cpu).shape == (numel,) and zeros(numel, cpu).dtype == torch.float32
        assert not zeros(numel, cpu).any() and not mapped(numel).any()
