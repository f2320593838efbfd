"""A worker over gloo may leave in any way: its process ends by itself, and gloo's threads are gone by then. One that
has forgotten finish() is told so, and no other.

A thread that is left may need the interpreter while it ends, and the process is then aborted, once in some fifty exits.
`benchmarks/exits.py` counts aborts in many exits.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXITS = Path(__file__).parents[2] / "support" / "exits.py"
LEFT = "gloo threads at exit:"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_thread_of_gloo_is_left_at_the_end_and_only_a_forgotten_finish_is_warned_of() -> None:
    done = subprocess.run([sys.executable, str(EXITS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ways = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ways) == 9
    for way in ways:
        warned = re.findall(r"worker (\d) ended without optimizer.finish\(\), (\d) steps after", way["text"])
        assert sorted(warned) == ([("0", "2"), ("1", "2")] if way["way"] == "finish forgotten" else []), way
        assert way["codes"] == way["expected"], way
        left = [line for line in way["text"].splitlines() if line.startswith(LEFT)]
        assert set(left) == {f"{LEFT} []"}, way
