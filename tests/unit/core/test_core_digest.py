"""The digest: any changed bit, order or length changes it; where the tensor lies does not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.core import digest as module
from diloco.core.digest import digest

SIZES = [1, 2, 3, 1023, 1024, 1025, 3 * 1024 + 5]


def values(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(st.sampled_from(SIZES), st.data())
def test_any_single_flipped_bit_changes_it(size: int, data: st.DataObject) -> None:
    tensor = values(size)
    before = digest(tensor)
    index, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    flipped = tensor.view(torch.int32)
    flipped[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert digest(tensor) != before


@given(st.sampled_from(SIZES[1:]), st.data())
def test_swapping_two_different_elements_changes_it(size: int, data: st.DataObject) -> None:
    tensor = values(size)
    i, j = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert digest(swapped) != digest(tensor)


@given(st.sampled_from(SIZES), st.integers(0, 7))
def test_it_is_independent_of_the_storage_offset(size: int, offset: int) -> None:
    tensor = values(size)
    room = torch.full((size + 16,), 7.0)
    room[offset : offset + size] = tensor
    assert digest(room[offset : offset + size]) == digest(tensor)


def test_it_is_independent_of_how_much_is_read_at_once_and_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(9 * 1024 + 11)
    expected = digest(tensor)
    for rows in (1, 2, 7, 1000):
        for few_threads in (0, 1000):  # with more than that, rows are summed instead of columns
            monkeypatch.setattr(module, "_ROWS_AT_ONCE", {"cpu": rows})
            monkeypatch.setattr(module, "_FEW_THREADS", few_threads)
            assert digest(tensor) == expected


def test_the_length_is_part_of_it_and_so_is_the_sign_of_zero() -> None:
    assert len({digest(torch.zeros(size)) for size in (0, 1, 2, 1024, 2048)}) == 5
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_it_is_sixteen_hexadecimal_digits_that_never_change_between_versions() -> None:
    """Workers of different versions compare them, so this value is part of the protocol."""
    assert digest(torch.arange(5000, dtype=torch.float32)) == "aa0586458f205a28"
