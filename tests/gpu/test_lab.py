"""The laboratory on a GPU: a stack of replicas, as one CUDA graph, is the same training as one after another."""

from pathlib import Path

import pytest
import torch

from diloco.lab import pretraining
from diloco.lab.arm import Arm, ArmResult
from diloco.lab.simulator import simulate
from diloco.lab.synthetic import synthetic_corpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

MODEL = {
    "hidden_size": 128, "intermediate_size": 352, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "tie_embeddings": True,
}  # fmt: skip


def run(folder: Path, how: str, **options: object) -> ArmResult:
    corpus = synthetic_corpus(folder / "corpus", 512, 200_000)
    pretraining._KEPT.clear()
    arm = Arm(
        "gpu", model=MODEL, workers=4, steps=40, pretraining_steps=10, batch_size=16, sequence_length=64,
        inner={"lr": 2e-3, "warmup_steps": 10}, sync={"num_inner_steps": 10, "codec": "fp32"}, eval_points=4,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return simulate(arm, 0, corpus, "cuda", how=how)


@pytest.mark.parametrize("options", [{}, {"absences": ((1, 10, 20),)}])
def test_stacked_replicas_train_as_those_one_after_another(tmp_path: Path, options: dict[str, object]) -> None:
    one_by_one = run(tmp_path, "sequential", **options)
    for how in ("stacked", "stacked 2"):
        stacked = run(tmp_path, how, **options)
        for (step, loss), (_, other) in zip(one_by_one.curve, stacked.curve, strict=True):
            assert loss == pytest.approx(other, abs=0.02), f"{how}, step {step}"
        assert stacked.bytes_sent_per_worker == one_by_one.bytes_sent_per_worker
