"""I8: the laboratory's trajectory is that of worker processes over torch.distributed, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.core.config import FaultsConfig
from diloco.core.outer_optimizers import outer_optimizer
from diloco.data.corpus import Corpus
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.lab.arm import Arm
from diloco.lab.simulation.batches import CorpusTokens
from diloco.lab.simulation.replicas import fresh, learning_rates
from diloco.lab.simulation.simulator import simulate
from diloco.models.native.model import NativeModel
from diloco.optimizer import DiLoCo
from diloco.training.inner import inner_optimizer
from support.processes import in_processes
from support.synthetic_corpus import synthetic_corpus

pytestmark = pytest.mark.slow

STREAMING = Arm(
    "streaming in four bits",
    model={
        "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        "tie_embeddings": True,
    },
    workers=2,
    steps=22,
    batch_size=4,
    sequence_length=8,
    inner={"lr": 1e-2, "warmup_steps": 3},
    outer={"lr": 0.7, "momentum": 0.8},
    sync={"num_inner_steps": 5, "codec": "e3m0", "fragments": 2, "overlap_steps": 2, "mixing": 0.5},
)  # fmt: skip
DROPPED = replace(
    STREAMING,
    name="one worker misses the last rounds",
    steps=30,
    drop=0.5,
    sync={"num_inner_steps": 5, "codec": "fp16"},
)
ARMS = (STREAMING, replace(STREAMING, name="streaming, dropped", drop=0.5), DROPPED)


def train_all(engine: TorchDistributedEngine, folder: str) -> list[str]:
    torch.set_num_threads(1)
    return [train(arm, engine, folder) for arm in ARMS]


def train(arm: Arm, engine: TorchDistributedEngine, folder: str) -> str:
    """An ordinary training loop; the digest of its anchors."""
    device, corpus = torch.device("cpu"), Corpus.open(Path(folder))
    text, config = CorpusTokens(corpus, device), arm.model_config(corpus.vocab_size)
    model = NativeModel(config)
    model.load_state_dict(fresh(config, 0, device).parameters)
    faults = FaultsConfig(arm.drop, 0) if arm.drop else None
    inner = inner_optimizer(model, arm.inner_config)
    optimizer = DiLoCo(
        model, inner, engine, sync=arm.sync_config, outer=outer_optimizer(arm.outer_config), faults=faults
    )
    rates = learning_rates(arm.inner_config, 0, arm.steps, arm.steps, device)
    ranges, length = text.ranges(arm, engine.worker), arm.sequence_length
    places = torch.from_numpy(text.windows(ranges, arm.steps, arm.batch_size, length, (0, engine.worker)))
    for step in range(arm.steps):
        tokens = text.batch(places[step], length)
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = float(rates[step])
        optimizer.step()
    optimizer.finish()
    return optimizer.anchor_digest()


def test_i8_the_laboratory_has_the_trajectory_of_processes_bit_for_bit(tmp_path: Path) -> None:
    corpus = synthetic_corpus(tmp_path / "corpus", 64, 8000)
    told = in_processes(2, train_all, str(corpus.folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        in_lab = [simulate(arm, 0, corpus, "cpu", how="sequential") for arm in ARMS]
    finally:
        torch.set_num_threads(threads)
    assert told == [[result.anchor_digest for result in in_lab]] * 2
    assert in_lab[0].rounds > 10
    assert in_lab[2].statistics[-1].contributors == 1, "at the end one worker has something left"
