"""What all tests share: one CPU thread, reproducible property tests, `support` importable, golden files by a flag."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `support`, also in the processes that tests spawn

os.environ["DILOCO_COMMAND"] = "diloco"  # commands that are printed do not depend on where the tests run

hypothesis.settings.register_profile("diloco", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("diloco")


def pytest_unconfigure() -> None:
    """Optimizers that tests have left unfinished go with the process: of no interest."""
    logging.getLogger("diloco.optimizer").disabled = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden", action="store_true", help="write tests/golden/*.json anew instead of comparing with them"
    )


@pytest.fixture(autouse=True)
def one_cpu_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def plain_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that starts the command line in this process remembers how: the next test shall not see it."""
    monkeypatch.setenv("DILOCO_COMMAND", "diloco")


@pytest.fixture
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate-golden"))
