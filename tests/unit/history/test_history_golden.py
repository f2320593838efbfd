"""What every reader says of recorded runs is what tests/golden/history has.

The files hold what the page's endpoints, Prometheus' metrics, the sinks, the figures, the terminal, the report,
`status` and `compare` make of each run. A change that is meant is a commit of its own; this file, run by itself, writes
the golden ones anew.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the file can be run by itself

from support.golden_runs import RUNS, compared, outputs, write_golden_run

GOLDEN = Path(__file__).parents[2] / "golden" / "history"


def as_json(made: object) -> Any:
    return json.loads(json.dumps(made))


@pytest.mark.parametrize("name", RUNS)
def test_what_every_reader_says_of_a_run_is_as_it_was(name: str, tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    made = as_json(outputs(write_golden_run(tmp_path / name, name), name))
    assert made.keys() == expected.keys()
    for reader in expected:
        assert made[reader] == expected[reader], reader


def test_what_compare_says_is_as_it_was(tmp_path: Path) -> None:
    folders = {name: write_golden_run(tmp_path / name, name) for name in RUNS}
    assert as_json(compared(folders)) == json.loads((GOLDEN / "compare.json").read_text())


def write(folder: Path) -> None:
    folders = {name: write_golden_run(folder / name, name) for name in RUNS}
    made = {name: outputs(folders[name], name) for name in RUNS} | {"compare": compared(folders)}
    for name, content in made.items():
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        (GOLDEN / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
