"""The trials by which a step's micro-batches are chosen. Needs a CUDA device."""

import pytest
import torch

from diloco.models.registry import build_model
from diloco.training.micro_batches import budget_bytes, trial_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_trial_measures_what_rows_need_and_leaves_nothing_behind() -> None:
    device = torch.device("cuda", 0)
    model = build_model("tiny", vocab_size=2048, sequence_length=128).to(device)
    before, cuda = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    trial_bytes(model, model.loss, 8, 128, device)  # libraries take their own memory at their first use
    few, many = (trial_bytes(model, model.loss, rows, 128, device) for rows in (8, 64))
    assert few is not None and many is not None and few < many < budget_bytes(device, 1)
    assert trial_bytes(model, model.loss, 64, 128, device) == many
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(cuda, torch.cuda.get_rng_state(device))


def test_too_many_rows_are_no_error() -> None:
    device = torch.device("cuda", 0)
    model = build_model("tiny", vocab_size=2048, sequence_length=128).to(device)
    torch.cuda.set_per_process_memory_fraction(0.02, device)
    try:
        assert trial_bytes(model, model.loss, 1 << 16, 128, device) is None
        assert trial_bytes(model, model.loss, 1, 128, device) is not None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
