"""fp32, bf16 and fp16 of an inner step; a skipped step is counted and still a step."""

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.optimizer import DiLoCo
from diloco.training.compute import Precision
from diloco.training.config.run import ComputeConfig, RunConfig, TrainingConfig
from support.threads import in_threads

CPU = torch.device("cpu")


def test_auto_is_fp32_on_a_cpu_and_changes_nothing() -> None:
    precision = Precision("auto", CPU, WorkerRanks())
    assert precision.name == "fp32"
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert precision.loss_scale is None and precision.state_dict() == {}


def test_bf16_and_fp16_compute_products_in_their_type_and_leave_weights_fp32() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Precision(name, CPU, WorkerRanks()).autocast():
            assert torch.get_autocast_dtype("cpu") == dtype
    layer = torch.nn.Linear(8, 8)
    precision = Precision("fp16", CPU, WorkerRanks())
    with precision.autocast():
        out = layer(torch.ones(2, 8))
    assert out.dtype == torch.float16
    precision.backward(out.float().sum())
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_an_overflow_in_one_worker_is_skipped_counted_and_the_workers_stay_in_step() -> None:
    def work(engine: Engine) -> tuple[str, int, int, int, float]:
        generator = torch.Generator().manual_seed(engine.worker)
        model = NativeModel(preset("tiny", vocab_size=64, max_sequence_length=16))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = DiLoCo(model, inner, engine, sync=SyncConfig(num_inner_steps=3))
        precision = Precision("fp16", CPU, WorkerRanks())
        for step in range(9):
            tokens = torch.randint(0, 64, (4, 17), generator=generator)
            with precision.autocast():
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            precision.backward(loss * (1e30 if (engine.worker, step) == (1, 4) else 1.0))
            precision.unscale(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            precision.step(optimizer)
            optimizer.zero_grad()
        optimizer.finish()
        outer = optimizer.loop
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        scale = precision.loss_scale or 0.0
        return optimizer.anchor_digest(), outer.inner_steps, outer.rounds, optimizer.skipped_steps, scale

    torch.manual_seed(0)
    first, second = in_threads(2, work)
    assert first[:3] == second[:3]
    assert first[1:4] == (9, 3, 0)
    assert second[3] == 1
    assert second[4] == first[4] / 2, "the scale of the worker that overflowed is halved"


def test_a_loss_scale_goes_on_where_it_was_saved() -> None:
    precision = Precision("fp16", CPU, WorkerRanks())
    state = precision.state_dict() | {"scale": 1024.0, "_growth_tracker": 7}
    other = Precision("fp16", CPU, WorkerRanks())
    other.load_state_dict(state)
    assert other.loss_scale == 1024.0
    assert other.state_dict() == state


def test_a_gradient_that_is_infinite_on_another_rank_is_so_on_this_one() -> None:
    class Others(WorkerRanks):
        def any(self, flag: bool) -> bool:
            assert flag is False
            return True

    precision = Precision("fp16", CPU, Others((0, 1)))
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision.backward((parameter * 2).sum())
    precision.unscale(optimizer)
    precision.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0, 1.0], "the step was skipped here too"


def test_fp16_is_refused_where_scaled_gradients_would_be_averaged() -> None:
    with pytest.raises(ConfigError, match="bf16 or fp32"):
        RunConfig(mode="data-parallel", compute=ComputeConfig(precision="fp16"), training=TrainingConfig())
