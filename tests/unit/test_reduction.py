"""The reduction that all engines share, done by one thread or by several."""

import threading
from itertools import combinations

import pytest
import torch

from diloco.codecs.registry import codec
from diloco.core.merging import cosines
from diloco.engines import reduction
from diloco.engines.reduction import reduce_parts

PART, ROWS = 64 * 1024, 11


def contributions(name: str, count: int = 3) -> list[torch.Tensor]:
    encoded = []
    common = torch.randn(ROWS, PART, generator=torch.Generator().manual_seed(99))
    for seed in range(count):
        values = common + torch.randn(ROWS, PART, generator=torch.Generator().manual_seed(seed))
        encoded.append(torch.empty(ROWS, codec(name).part_bytes(PART), dtype=torch.uint8))
        codec(name).encode(values, encoded[-1])
    return encoded


def reduced(name: str, threads: int) -> tuple[bytes, list[float]]:
    """In a thread of its own, as rounds are; the number of threads is each thread's."""
    told: list[tuple[bytes, list[float]]] = []

    def work() -> None:
        torch.set_num_threads(threads)
        parts = contributions(name)
        comparison = reduce_parts(codec(name), parts, [1.0, 2.0, 0.5], PART, parts[0])
        told.append((parts[0].numpy().tobytes(), list(comparison.products)))

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    return told[0]


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8"])
def test_several_threads_give_the_bytes_of_one(name: str) -> None:
    one, several = reduced(name, 1), reduced(name, 3)
    assert one[0] == several[0]
    assert several[1] == pytest.approx(one[1], abs=1e-5 * max(one[1]))


def test_the_threads_leave_the_number_of_torchs_own_threads_alone() -> None:
    before = torch.get_num_threads()
    reduced("fp32", 3)
    assert torch.get_num_threads() == before
    assert 3 in reduction._pools


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_cosines_of_contributions_come_with_their_mean_from_all_parts_or_some(count: int) -> None:
    parts = contributions("fp16", count)
    values = [torch.empty(ROWS, PART) for _ in parts]
    for data, into in zip(parts, values, strict=True):
        codec("fp16").decode(data, into)
    comparison = reduce_parts(codec("fp16"), parts, [1.0] * count, PART, torch.empty_like(parts[0]))
    told = cosines(range(count), comparison.products)
    assert [(a, b) for a, b, _ in told] == list(combinations(range(count), 2))
    for a, b, cosine in told:
        expected = float(torch.cosine_similarity(values[a].view(-1).double(), values[b].view(-1).double(), dim=0))
        assert cosine == pytest.approx(expected, abs=6e-5 if count <= 4 else 0.02)


def test_an_error_in_a_thread_is_raised() -> None:
    parts = contributions("fp32")

    def work() -> None:
        torch.set_num_threads(3)
        with pytest.raises(RuntimeError):
            reduce_parts(codec("fp32"), [parts[0], parts[1][:, :8]], [1.0, 1.0], PART, parts[0])
        done.set()

    done, before = threading.Event(), torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert done.is_set()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_squared_norms_of_contributions_come_with_their_mean_from_all_parts(count: int) -> None:
    parts = contributions("int8", count)
    squares = [0.0] * (count - 1) + [1000.0]
    reduce_parts(codec("int8"), parts, [1.0] * count, PART, torch.empty_like(parts[0]), squares=squares)
    for index, (square, data) in enumerate(zip(squares, parts, strict=True)):
        values = torch.empty(ROWS, PART)
        codec("int8").decode(data, values)
        expected = float(values.double().square().sum()) + 1000.0 * (index == count - 1)
        assert square == pytest.approx(expected, rel=1e-4)
