"""The loops in README.md and docs/other-loops.md run as they stand, in torchrun's environment, without a warning."""

import re
from pathlib import Path

import pytest

from support.torchrun import Torchrun

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_END = re.compile(r"worker (\d)  rounds (\d+)  parameters ([0-9a-f]{16})")

BEFORE = """
import torch
class Model(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()
model = Model(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(399, 8, 4, generator=torch.Generator().manual_seed(0))  # worker 0 gets 200 of them, worker 1 199
my_share = lambda data, worker, workers: data[worker::workers]
"""
AFTER = """
print(f"worker {engine.worker}  rounds {optimizer.rounds}  parameters {optimizer.anchor_digest()}", flush=True)
"""


def loop_in(page: str) -> str:
    """The one that connects."""
    [block] = [block for block in _BLOCK.findall((ROOT / page).read_text()) if "diloco.connect()" in block]
    return block


LOOPS = {
    "README.md": (BEFORE + loop_in("README.md") + AFTER, 2),
    "docs/other-loops.md": ("import torch; torch.set_num_threads(1)\n" + loop_in("docs/other-loops.md"), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", LOOPS)
def test_a_documented_loop_ends_with_the_same_parameters_though_the_shares_differ(page: str, tmp_path: Path) -> None:
    script, rounds = LOOPS[page]
    path = tmp_path / "loop.py"
    path.write_text(script)
    output = Torchrun(path, 2, tmp_path).wait()
    ends = _END.findall(output)
    assert sorted(worker for worker, _, _ in ends) == ["0", "1"], output
    assert len({digest for _, _, digest in ends}) == 1, output
    assert {int(count) for _, count, _ in ends} == {rounds}, output
    assert "finish()" not in output, output  # no warning of a forgotten one


def test_every_python_block_of_the_loops_page_is_python() -> None:
    blocks = _BLOCK.findall((ROOT / "docs/other-loops.md").read_text())
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "docs/other-loops.md", "exec")
