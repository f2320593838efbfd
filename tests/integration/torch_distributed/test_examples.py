"""The examples for other people's loops run as they say, in torchrun's environment, without a warning."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.torchrun import Torchrun

EXAMPLES = Path(__file__).parents[3] / "examples"
FRAMEWORKS = ("hf_trainer", "trl_lora", "hf_accelerate", "lightning_trainer")
_END = re.compile(r"worker (\d)  first loss ([\d.]+)  final loss ([\d.]+)  parameters ([0-9a-f]{16})")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_shorter_than_60_lines_and_says_how_it_is_started(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 60
    assert re.search(rf"torchrun --nproc-per-node [24] examples/{example.name}", text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Torchrun]]:
    """All of them at once: most of their time is imports."""
    started = {name: Torchrun(EXAMPLES / f"{name}.py", 2, tmp_path_factory.mktemp(name)) for name in FRAMEWORKS}
    yield started
    for one in started.values():
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_under_torchrun_the_loss_falls_and_both_workers_end_with_the_same_parameters(
    name: str, runs: dict[str, Torchrun]
) -> None:
    output = runs[name].wait()
    ends = _END.findall(output)
    assert sorted(worker for worker, _, _, _ in ends) == ["0", "1"], output
    assert len({(final, digest) for _, _, final, digest in ends}) == 1, output
    assert all(float(final) < float(first) / 3 for _, first, final, _ in ends), output
