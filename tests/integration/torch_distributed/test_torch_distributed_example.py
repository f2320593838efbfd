"""examples/existing_loop.py does what it says: five marked lines make an ordinary loop a DiLoCo worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "existing_loop.py"


def test_the_example_changes_an_ordinary_loop_by_at_most_five_marked_lines() -> None:
    lines = EXAMPLE.read_text().splitlines()
    marked = [line for line in lines if line.endswith("# diloco")]
    assert 1 <= len(marked) <= 5
    code = "\n".join(line for line in lines if not line.endswith("# diloco")).split('"""', 2)[2]
    assert "diloco" not in code  # nothing else of ours is in the loop
    assert set(re.findall(r"\bengine\.\w+", code)) == {
        "engine.worker"
    }  # the worker's number, for its share of the data


@pytest.mark.slow
def test_the_example_runs_under_torchrun_and_its_workers_end_with_the_same_parameters() -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    ends = re.findall(r"worker (\d)  final loss ([\d.]+)  parameters ([0-9a-f]{16})", run.stdout)
    assert sorted(worker for worker, _, _ in ends) == ["0", "1"]
    assert len({(loss, digest) for _, loss, digest in ends}) == 1
    first = float(re.findall(r"step   0  loss ([\d.]+)", run.stdout)[0])
    assert float(ends[0][1]) < first / 3
