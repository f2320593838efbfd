"""Frameworks whose workers have shards of different sizes: all end with the same parameters, and no step is lost.

Each worker is a thread with a framework of its own; examples/ has the same in processes.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import diloco
from diloco.engines.base import Engine
from diloco.integrations.lightning import LightningCallback
from diloco.integrations.transformers import TransformersCallback
from support.threads import in_threads

H = 4
GAPS = {"1": 1, "H - 1": H - 1, "H": H, "3 H": 3 * H}
over_gaps = pytest.mark.parametrize("gap", GAPS.values(), ids=GAPS)
Ended = tuple[int, float, str]
"""A worker's steps, the work of all workers in the means, and the digest of its parameters."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*treespec, LeafSpec:FutureWarning",  # Lightning's own, where torch is newer than it
    "ignore:The 'train_dataloader' does not have many workers",
)
# What a framework keeps for the whole process is made by one thread at a time, and by all before the first one trains.
building = threading.Lock()
built = threading.Barrier(2, timeout=100.0)


@pytest.fixture(autouse=True)
def no_hub_and_a_fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Watched:
    """An optimizer whose rounds are added up."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.optimizer = diloco.DiLoCo(model, inner, engine, H=H)
        self.optimizer.on_round = self._add
        self.work = 0.0

    def _add(self, event: Any) -> None:
        self.work += event.result.total_weight

    def ended(self) -> Ended:
        return self.optimizer.loop.state.steps_taken, self.work, self.optimizer.anchor_digest()


def with_trainer(engine: Engine, steps: int, folder: Path, **options: Any) -> Ended:
    with building:
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=8, **shape))
        args = TrainingArguments(
            output_dir=str(folder / str(engine.worker)), num_train_epochs=1, per_device_train_batch_size=2,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
            logging_strategy="no",
        )  # fmt: skip
    watched = Watched(model, engine)
    data = [{"input_ids": row, "labels": row} for row in torch.arange(2 * steps * 8).reshape(-1, 8) % 13]
    callbacks = [TransformersCallback(watched.optimizer, **options)]
    with building:
        trainer = Trainer(model, args, train_dataset=data, optimizers=(watched.optimizer, None), callbacks=callbacks)
    built.wait()
    trainer.train()
    return watched.ended()


def with_accelerate(engine: Engine, steps: int, folder: Path) -> Ended:
    del folder
    with building:
        accelerator, model = Accelerator(cpu=True), nn.Linear(4, 1)
    watched = Watched(model, engine)
    data = DataLoader(TensorDataset(torch.ones(2 * steps, 4)), batch_size=2)
    with building:
        model, optimizer, data = accelerator.prepare(model, watched.optimizer, data)
    built.wait()
    for (x,) in data:
        accelerator.backward(F.mse_loss(model(x), x.sum(-1, keepdim=True)))
        optimizer.step()
        optimizer.zero_grad()
    watched.optimizer.finish()
    return watched.ended()


class Line(pl.LightningModule):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.net, self.engine = nn.Linear(4, 1), engine

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[0].sum(-1, keepdim=True))

    def configure_optimizers(self) -> Any:
        self.watched = Watched(self, self.engine)
        return self.watched.optimizer


def with_lightning(engine: Engine, steps: int, folder: Path, **options: Any) -> Ended:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet = dict.fromkeys(names, False)
    with building:
        model = Line(engine)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder,
            callbacks=[LightningCallback(**options)], **quiet,
        )  # fmt: skip
    built.wait()
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(2 * steps, 4)), batch_size=2))
    return model.watched.ended()


LOOPS = {"Trainer": with_trainer, "Accelerate": with_accelerate, "Lightning": with_lightning}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@over_gaps
def test_shards_of_different_sizes_end_with_the_same_parameters_and_all_work_in_the_means(
    loop: Any, gap: int, tmp_path: Path
) -> None:
    counts = [H + 1, H + 1 + gap]
    first, second = in_threads(2, lambda engine: loop(engine, counts[engine.worker], tmp_path))
    assert [first[0], second[0]] == counts
    assert first[1] == second[1] == sum(counts)
    assert first[2] == second[2]


@pytest.mark.parametrize("loop", [with_trainer, with_lightning])
def test_with_end_together_a_worker_stops_after_the_round_in_which_another_is_done(loop: Any, tmp_path: Path) -> None:
    counts = [H + 1, 20 * H]
    first, second = in_threads(2, lambda engine: loop(engine, counts[engine.worker], tmp_path, end_together=True))
    assert first[2] == second[2]
    assert (first[0], second[0]) == (H + 1, 2 * H)  # it hears of it in the round after its 2 H steps
    assert first[1] == second[1] == 3 * H + 1
