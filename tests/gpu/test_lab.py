"""The laboratory on a GPU: a stack of replicas, as one CUDA graph, is the same training as one after another."""

from pathlib import Path

import pytest
import torch

from diloco.lab.arm import Arm, ArmResult
from diloco.lab.simulation.checkpoint import ArmCheckpoint, Interrupted
from diloco.lab.simulation.simulator import simulate
from support.synthetic_corpus import synthetic_corpus

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # torch's own, when it compiles
]

MODEL = {
    "hidden_size": 128, "intermediate_size": 352, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "tie_embeddings": True,
}  # fmt: skip


def run(folder: Path, how: str, saving: ArmCheckpoint | None = None) -> ArmResult:
    corpus = synthetic_corpus(folder / "corpus", 512, 200_000)
    arm = Arm(
        "gpu", model=MODEL, workers=4, steps=40, batch_size=16, sequence_length=64,
        inner={"lr": 2e-3, "warmup_steps": 10}, sync={"num_inner_steps": 10, "codec": "fp32"},
        eval_points=4, absences=((1, 10, 20),),
    )  # fmt: skip
    return simulate(arm, 0, corpus, "cuda", how=how, checkpoint=saving)


def test_stacked_replicas_train_as_those_one_after_another(tmp_path: Path) -> None:
    one_by_one, stacked = run(tmp_path, "sequential"), run(tmp_path, "stacked 2")
    for (step, loss), (_, other) in zip(one_by_one.curve, stacked.curve, strict=True):
        assert loss == pytest.approx(other, abs=0.02), f"step {step}"
    assert stacked.bytes_sent_per_worker == one_by_one.bytes_sent_per_worker
    assert stacked.loss < stacked.curve[0][1] - 0.2


@pytest.mark.parametrize("how", ["sequential", "stacked 2"])
def test_an_interrupted_arm_goes_on_up_to_rounding(tmp_path: Path, how: str) -> None:
    path, asked = tmp_path / "arm.safetensors", iter([False] * 24 + [True] * 2)
    with pytest.raises(Interrupted):
        run(tmp_path, how, ArmCheckpoint(path, stop=lambda: next(asked)))
    saving = ArmCheckpoint(path)
    resumed, whole = run(tmp_path, how, saving), run(tmp_path, how)
    assert saving.resumed_at == 25
    assert [loss for _, loss in resumed.curve] == pytest.approx([loss for _, loss in whole.curve], abs=0.02)
    assert resumed.simulated_seconds == whole.simulated_seconds
