"""A worker over gloo may leave in any way: its process ends by itself, and gloo's threads are gone by then.

A thread that is left may need the interpreter while it ends, and the process is then aborted, once in some fifty exits.
`benchmarks/exits.py` counts aborts in many exits.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXITS = Path(__file__).parents[2] / "support" / "exits.py"
LEFT = "gloo threads at exit:"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, str(EXITS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ways = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ways) == 8
    for way in ways:
        assert way["codes"] == way["expected"], way
        left = [line for line in way["text"].splitlines() if line.startswith(LEFT)]
        assert set(left) == {f"{LEFT} []"}, way
