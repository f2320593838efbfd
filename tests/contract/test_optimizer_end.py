"""The end of a loop as its user sees it: numbers, a function per round, and warnings that name the remedy."""

import gc
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.local import LocalSwarm
from diloco.outer.rounds import RoundEvent
from support.alone import made, steps
from support.problem import build, loss_of, net
from support.threads import in_threads


def stepped(engine: Engine, H: int, count: int) -> tuple[nn.Module, diloco.DiLoCo]:
    model, optimizer = build(engine, SyncConfig(H))
    steps(model, optimizer, 0, count, engine.worker)
    return model, optimizer


# Numbers


def test_the_numbers_of_the_rounds_are_public_and_a_function_is_called_with_each() -> None:
    def work(engine: Engine) -> Any:
        events: list[RoundEvent] = []
        model, optimizer = build(engine, SyncConfig(3, "fp32"))
        optimizer.on_round = events.append
        before = optimizer.similarity
        steps(model, optimizer, 0, 7, engine.worker)
        numbers = optimizer.position, optimizer.rounds, optimizer.failures, optimizer.bytes_sent
        assert optimizer.similarity == events[0].similarity  # the latest mean of two
        assert optimizer.on_round == events.append
        optimizer.finish()
        return before, numbers, [event.key.sequence for event in events], events[0].similarity

    first, second = in_threads(2, work, fail_at=[(1, 1)])
    parts = 11 * 4096  # of the problem's model, in fp32; a worker sends and receives each part once
    for before, (position, rounds, failures, sent), sequences, similarity in (first, second):
        assert before is None and -1.0 <= similarity <= 1.0
        assert position == 7 and rounds + failures == 2 and sequences == [0, 1, 2]
        assert sent > parts / 2
    assert first[1][2] == 0 and second[1][2] == 1


def test_similarity_needs_two_workers() -> None:
    model = net()
    optimizer = made(model, SyncConfig(2))
    steps(model, optimizer, 0, 4)
    assert optimizer.rounds == 2 and optimizer.similarity is None


# A forgotten finish()


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    gc.collect()


def forgotten(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    """(worker, steps) of each warning."""
    gc.collect()
    return re.findall(r"worker (\d) ended without optimizer.finish\(\), (\d+) steps after its last round", caplog.text)


def one_of_two(H: int) -> tuple[nn.Module, diloco.DiLoCo]:
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    return model, diloco.DiLoCo(model, inner, LocalSwarm(2).engines()[0], H=H)


def test_steps_that_no_round_has_averaged_are_warned_of_when_the_optimizer_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop() -> None:
        model, optimizer = one_of_two(10)
        optimizer.on_round = lambda _: print(optimizer.rounds)  # a function that knows the optimizer keeps it not alive
        steps(model, optimizer, 0, 3)

    loop()
    assert forgotten(caplog) == [("0", "3")]
    assert "Call optimizer.finish() after the loop on every worker" in caplog.text


def test_no_step_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = one_of_two(10)
    del optimizer
    assert forgotten(caplog) == []


def test_no_warning_after_finish_nor_where_there_is_no_other_worker(caplog: pytest.LogCaptureFixture) -> None:
    def work(engine: Engine) -> None:
        _, optimizer = stepped(engine, 2, 5)
        optimizer.finish()

    in_threads(2, work)
    stepped(diloco.alone(), 2, 5)
    assert forgotten(caplog) == []


def test_no_warning_while_an_exception_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        model, optimizer = one_of_two(10)
        steps(model, optimizer, 0, 1)
        try:
            raise ValueError("the loop is wrong")
        except ValueError:
            del optimizer
            gc.collect()
            raise

    with pytest.raises(ValueError, match="the loop is wrong"):
        work()
    assert forgotten(caplog) == []


# One round only


def few_rounds(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    """(steps, H, the H that is proposed) of each warning."""
    return re.findall(r"after (\d+) steps and a single round, since H = (\d+).*\(H = (\d+)\)", caplog.text)


@pytest.mark.parametrize(
    ("count", "H", "warned"), [(30, 50, [("30", "50", "3")]), (6, 6, [("6", "6", "1")]), (9, 6, [])]
)
def test_a_run_that_ends_after_one_round_is_warned_of_with_a_smaller_h(
    count: int, H: int, warned: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = made(model, SyncConfig(H))
    steps(model, optimizer, 0, count)
    with caplog.at_level(logging.WARNING):
        optimizer.finish()
    assert few_rounds(caplog) == warned


def test_an_early_end_or_a_loop_without_steps_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = made(net(), SyncConfig(50))
    optimizer.finish()
    model = net()
    optimizer = made(model, SyncConfig(50))
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.finish(early=True)
    assert few_rounds(caplog) == []
