"""What the frameworks do around an optimizer keeps working with DiLoCo: schedules, clipping, scaling, checkpoints."""

import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import diloco
from diloco.core.digest import digest
from diloco.engines.base import Engine
from diloco.errors import ConfigError
from diloco.integrations.lightning import LightningCallback
from diloco.integrations.transformers import TransformersCallback
from support.threads import in_threads

seeding = threading.Lock()
EVERY_TWO = diloco.SyncConfig(num_inner_steps=2, codec="fp32")
ACROSS = diloco.SyncConfig(num_inner_steps=4, overlap_steps=2, codec="fp32")
OVERLAPPED = diloco.SyncConfig(num_inner_steps=2, overlap_steps=1, codec="fp32")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*treespec, LeafSpec:FutureWarning",  # Lightning's own, where torch is newer than it
    "ignore:The '(train|val)_dataloader' does not have many workers",
)


@pytest.fixture(autouse=True)
def no_hub_and_a_fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def around(model: nn.Module, sync: diloco.SyncConfig = EVERY_TWO) -> diloco.DiLoCo:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return diloco.DiLoCo(model, inner, diloco.alone(), sync=sync)


# Hugging Face Trainer


def trainer(folder: Path, sync: diloco.SyncConfig = EVERY_TWO, **options: Any) -> tuple[Trainer, diloco.DiLoCo]:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=8, **shape))
    optimizer = around(model, sync)
    fixed = {"per_device_train_batch_size": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    choices = {"max_steps": 7, "save_strategy": "no", "gradient_accumulation_steps": 2, "warmup_steps": 3} | options
    args = TrainingArguments(output_dir=str(folder), dataloader_pin_memory=False, **fixed, **choices)
    tokens = torch.arange(64 * 8).reshape(64, 8) % 13
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callbacks = [TransformersCallback(optimizer)]
    return Trainer(model, args, None, data, data, optimizers=(optimizer, None), callbacks=callbacks), optimizer


@pytest.mark.parametrize("sync", [EVERY_TWO, OVERLAPPED], ids=["after a round", "within one"])
def test_a_trainer_resumed_from_its_own_checkpoint_ends_as_if_it_had_never_stopped(
    sync: diloco.SyncConfig, tmp_path: Path
) -> None:
    whole, optimizer = trainer(tmp_path, sync, save_strategy="steps", save_steps=4)
    whole.train()
    resumed, optimizer_again = trainer(tmp_path / "again", sync, save_strategy="steps", save_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert optimizer.loop.inner_steps == optimizer_again.loop.inner_steps == 7
    assert optimizer.loop.rounds == optimizer_again.loop.rounds >= 3
    assert optimizer.anchor_digest() == optimizer_again.anchor_digest()
    for mine, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_after_training_a_trainers_model_holds_the_anchor(tmp_path: Path) -> None:
    whole, optimizer = trainer(tmp_path)
    whole.train()
    before = [parameter.detach().clone() for parameter in whole.model.parameters()]
    with optimizer.outer_parameters():
        assert all(torch.equal(a, b) for a, b in zip(before, whole.model.parameters(), strict=True))
    rates = optimizer.param_groups[0]["lr"]
    assert rates == 0.0  # the Trainer's own linear schedule has come to its end


def test_load_best_model_at_end_is_refused_before_the_first_step(tmp_path: Path) -> None:
    whole, optimizer = trainer(
        tmp_path, load_best_model_at_end=True, save_strategy="steps", eval_strategy="steps", eval_steps=4, save_steps=4
    )
    with pytest.raises(ConfigError, match="load_best_model_at_end"):
        whole.train()
    assert optimizer.loop.inner_steps == 0


@pytest.mark.parametrize(("processes", "gpus"), [(2, 1), (1, 2)])
def test_a_trainer_that_would_average_gradients_itself_is_refused(processes: int, gpus: int) -> None:
    args: Any = SimpleNamespace(world_size=processes, n_gpu=gpus, load_best_model_at_end=False)
    with pytest.raises(ConfigError, match=r"connect\(island=True\)"):
        TransformersCallback(around(nn.Linear(2, 2))).on_train_begin(args, TrainerState(), TrainerControl())


@pytest.mark.parametrize("stopping", [False, True])
def test_a_trainer_ends_when_another_worker_has_asked_for_the_end(stopping: bool) -> None:
    optimizer: Any = SimpleNamespace(stopping=stopping)
    control, args = TrainerControl(), SimpleNamespace()
    TransformersCallback(optimizer).on_step_end(args, TrainerState(), control)
    assert control.should_training_stop == stopping


# Accelerate


def test_accelerate_scales_clips_and_skips_while_the_schedule_of_rounds_goes_on() -> None:
    Accelerator(cpu=True)
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = diloco.DiLoCo(model, inner, diloco.alone(), sync=EVERY_TWO, outer=diloco.SGD(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerated = AcceleratedOptimizer(optimizer, device_placement=True, scaler=scaler)
    for gradient in (1.0, math.inf, 3.0, 1.0):
        scaler.scale(model.weight.sum() * gradient).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), math.sqrt(2.0))  # 3.0 becomes 1.0
        accelerated.step()
        accelerated.zero_grad()
    assert (optimizer.loop.inner_steps, optimizer.skipped_steps, optimizer.loop.rounds) == (4, 1, 2)
    assert torch.allclose(model.weight, torch.full((1, 2), -3.0), atol=1e-5)


def _accelerate(steps: int, sync: diloco.SyncConfig) -> tuple[Accelerator, diloco.DiLoCo, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = around(model, sync)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    prepared = accelerator.prepare(model, optimizer, schedule)

    def train(count: int) -> None:
        for _ in range(count):
            accelerator.backward(F.mse_loss(prepared[0](torch.ones(2, 4)), torch.ones(2, 1)))
            prepared[1].step()
            prepared[2].step()
            prepared[1].zero_grad()

    return accelerator, optimizer, model, train


@pytest.mark.parametrize(("sync", "steps"), [(EVERY_TWO, 3), (OVERLAPPED, 2)], ids=["after a round", "within one"])
def test_accelerate_saves_and_loads_the_outer_state_with_the_optimizer(
    sync: diloco.SyncConfig, steps: int, tmp_path: Path
) -> None:
    accelerator, optimizer, model, train = _accelerate(8, sync)
    train(steps)
    assert len(optimizer.loop.in_flight) == sync.overlap_steps
    accelerator.save_state(str(tmp_path))
    train(8 - steps)
    AcceleratorState._reset_state(reset_partial_state=True)
    again, optimizer_again, model_again, train_again = _accelerate(8, sync)
    again.load_state(str(tmp_path))
    assert optimizer_again.loop.inner_steps == steps
    train_again(8 - steps)
    assert optimizer.anchor_digest() == optimizer_again.anchor_digest()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_again.parameters(), strict=True))


def test_diloco_around_a_diloco_that_accelerate_has_prepared_is_refused() -> None:
    model = nn.Linear(4, 1)
    prepared = Accelerator(cpu=True).prepare(around(model))
    with pytest.raises(ConfigError, match="a DiLoCo already"):
        diloco.DiLoCo(model, prepared, diloco.alone())


# Lightning


class Line(pl.LightningModule):
    """A straight line through data that turn infinite at one batch."""

    def __init__(self, broken: int | None = None, sync: diloco.SyncConfig = EVERY_TWO) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.broken, self.sync = nn.Linear(4, 1), broken, sync

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[0].sum(-1, keepdim=True))
        return loss * math.inf if index == self.broken else loss

    def configure_optimizers(self) -> Any:
        optimizer = around(self, self.sync)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ScaledFloat32(MixedPrecision):
    """Lightning's 16-bit plugin with its GradScaler, without 16-bit arithmetic, which not every CPU has."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))

    def forward_context(self) -> Any:
        return nullcontext()


def fit(model: Line, folder: Path, resume: Path | None = None, **options: Any) -> diloco.DiLoCo:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    fixed = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "gradient_clip_val": 0.5}
    saving = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    callbacks = [LightningCallback(), saving]
    trainer = pl.Trainer(default_root_dir=folder, callbacks=callbacks, **quiet, **(fixed | options))
    data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)))
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=None if resume is None else str(resume))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, diloco.DiLoCo)
    return optimizer


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # the test's own doing
@pytest.mark.parametrize("sync", [EVERY_TWO, ACROSS], ids=["after a round", "within one"])
def test_lightning_resumed_from_its_own_checkpoint_ends_as_if_it_had_never_stopped(
    sync: diloco.SyncConfig, tmp_path: Path
) -> None:
    whole, resumed = Line(sync=sync), Line(sync=sync)
    optimizer = fit(whole, tmp_path)
    optimizer_again = fit(
        resumed,
        tmp_path / "again",
        tmp_path / "epoch=0.ckpt",  # after 5 steps
    )
    assert optimizer.loop.inner_steps == optimizer_again.loop.inner_steps == 10
    assert optimizer.anchor_digest() == optimizer_again.anchor_digest()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_lightning_scales_clips_and_skips_while_the_schedule_of_rounds_goes_on(tmp_path: Path) -> None:
    model = Line(broken=3)
    optimizer = fit(model, tmp_path, plugins=[ScaledFloat32()])
    assert (optimizer.loop.inner_steps, optimizer.skipped_steps) == (10, 2)  # once an epoch
    assert optimizer.loop.rounds == 5
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_lightning_accumulates_and_steps_once_in_two_batches(tmp_path: Path) -> None:
    optimizer = fit(Line(), tmp_path, accumulate_grad_batches=2)
    assert (optimizer.loop.inner_steps, optimizer.skipped_steps) == (6, 0)  # of 5 batches an epoch, 2 + 2 + 1


def test_lightning_needs_diloco_as_its_only_optimizer(tmp_path: Path) -> None:
    class Forgotten(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(ConfigError, match="returned AdamW"):
        fit(Forgotten(), tmp_path)


def test_a_lightning_trainer_of_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"connect\(island=True\)"):
        LightningCallback().setup(SimpleNamespace(world_size=2), None, "fit")


@pytest.mark.parametrize("stopping", [False, True])
def test_a_lightning_trainer_ends_when_another_worker_has_asked_for_the_end(
    stopping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = around(model)
    monkeypatch.setattr(type(optimizer.loop), "stopping", stopping)
    trainer = SimpleNamespace(optimizers=[optimizer], global_step=0, should_stop=False)
    callback = LightningCallback()
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert trainer.should_stop == stopping


# peft


def test_a_lora_sends_its_adapters_and_nothing_else() -> None:
    def work(engine: Engine) -> tuple[int, int, int, str]:
        with seeding:
            torch.manual_seed(engine.worker)
            base = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
            model = get_peft_model(base, LoraConfig(r=4, target_modules=["0", "2"]))
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = diloco.DiLoCo(model, torch.optim.AdamW(adapters, lr=1e-2), engine, H=2)
        frozen = torch.cat([p.detach().reshape(-1) for p in model.parameters() if not p.requires_grad])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((3, 256), engine.worker + 1.0)).square().mean().backward()
            optimizer.step()
        after = torch.cat([p.detach().reshape(-1) for p in model.parameters() if not p.requires_grad])
        assert torch.equal(frozen, after)
        sent = optimizer.bytes_sent
        optimizer.finish()
        return sent, sum(p.numel() for p in adapters), frozen.numel(), digest(after)

    first, second = in_threads(2, work)
    sent, adapters, frozen, _ = first
    assert sent == second[0] and first[3] == second[3]  # the frozen weights are worker 0's
    assert 2 * adapters <= sent < 2.2 * adapters + 2000 < frozen  # fp16, each part once, and a header
