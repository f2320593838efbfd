"""Anchors and outer momentum of a large fragment lie in huge pages."""

import re
import sys
from pathlib import Path

import torch

from diloco.core.fragments import build_fragments
from diloco.core.memory import LARGE_BYTES, mapped, zeros
from diloco.core.outer_optimizers import Nesterov


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


def test_memory_of_any_size_is_zero() -> None:
    cpu = torch.device("cpu")
    for numel in (0, 1, LARGE_BYTES // 4):
        assert zeros(numel, cpu).shape == (numel,) and zeros(numel, cpu).dtype == torch.float32
        assert not zeros(numel, cpu).any() and not mapped(numel).any()
