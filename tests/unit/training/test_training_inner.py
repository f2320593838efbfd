"""AdamW's groups and its learning rate over a run."""

import math
import os
import subprocess
import sys

import pytest
import torch

from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import Transformer
from diloco.training.config.run import InnerConfig
from diloco.training.inner import inner_optimizer, learning_rate_schedule


def rates(config: InnerConfig, steps: int) -> list[float]:
    """The learning rate of each step, and the one after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = learning_rate_schedule(optimizer, config, steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_the_rate_rises_linearly_to_its_peak_and_is_never_zero() -> None:
    seen = rates(InnerConfig(lr=2.0, warmup_steps=4), 100)
    assert seen[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert max(seen) == pytest.approx(2.0)
    assert min(seen) > 0


def test_after_the_warm_up_the_rate_falls_as_a_cosine_to_its_final_share() -> None:
    config = InnerConfig(lr=2.0, warmup_steps=20, final_lr_ratio=0.1)
    seen = rates(config, 120)
    assert seen[20:] == sorted(seen[20:], reverse=True)
    assert seen[70] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way
    assert seen[45] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert seen[-1] == pytest.approx(0.2)
    assert seen[-2] == pytest.approx(0.2, rel=0.01)


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    seen = rates(InnerConfig(lr=1.0, warmup_steps=0, final_lr_ratio=0.0), 10)
    assert seen[0] == pytest.approx(1.0)
    assert seen[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("steps", [1, 9, 10])
def test_a_warm_up_as_long_as_the_run_or_longer_only_rises(steps: int) -> None:
    seen = rates(InnerConfig(lr=1.0, warmup_steps=10), steps)[:-1]
    assert seen == pytest.approx([(step + 1) / 10 for step in range(steps)])


def tiny_model() -> Transformer:
    return Transformer(
        ModelConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            max_sequence_length=8,
            tie_embeddings=True,
        )
    )


def test_matrices_and_embeddings_decay_norms_do_not_and_each_parameter_is_in_one_group() -> None:
    model = tiny_model()
    optimizer = inner_optimizer(model, InnerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay)
    assert decay.keys() == {id(parameter) for parameter in model.parameters()}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.3), name


def test_the_optimizer_has_the_rate_and_the_betas_of_the_configuration() -> None:
    optimizer = inner_optimizer(tiny_model(), InnerConfig(lr=0.25, beta1=0.5, beta2=0.75))
    for group in optimizer.param_groups:
        assert group["lr"] == 0.25
        assert group["betas"] == (0.5, 0.75)


def test_a_frozen_parameter_and_a_model_without_vectors_need_no_group() -> None:
    model = torch.nn.Linear(3, 3, bias=True)
    model.bias.requires_grad_(False)
    (group,) = inner_optimizer(model, InnerConfig()).param_groups
    assert group["params"] == [model.weight]


MUON = """
import torch
torch.set_num_threads(1)
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.training.config.run import InnerConfig
from diloco.training.inner import inner_optimizer, learning_rate_schedule

def make():
    torch.manual_seed(0)
    model = NativeModel(preset("tiny", vocab_size=64, max_sequence_length=16))
    optimizer = inner_optimizer(model, InnerConfig(optimizer="muon", lr=1e-2, warmup_steps=4))
    return model, optimizer, learning_rate_schedule(optimizer, InnerConfig(lr=1e-2, warmup_steps=4), 40)

def train(model, optimizer, schedule, first, last):
    for step in range(first, last):
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step % 3))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss.item()

model, optimizer, schedule = make()
start = train(model, optimizer, schedule, 0, 1)
names = {id(p): name for name, p in model.named_parameters()}
kinds = {names[id(p)]: set(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]}
assert kinds.keys() == dict(model.named_parameters()).keys()
for name, kind in kinds.items():
    hidden = ".layers." in name and "norm" not in name
    assert kind == ({"momentum_buffer"} if hidden else {"step", "exp_avg", "exp_avg_sq"}), (name, kind)
rates = {group["lr"] for group in optimizer.param_groups}
assert rates == {1e-2 * 2 / 4}, rates
saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict(), schedule.state_dict()
import copy
saved = copy.deepcopy(saved)
end = train(model, optimizer, schedule, 1, 12)
assert end < start - 0.5, (start, end)
again, other, its_schedule = make()
train(again, other, its_schedule, 0, 3)
again.load_state_dict(saved[0]); other.load_state_dict(saved[1]); its_schedule.load_state_dict(saved[2])
train(again, other, its_schedule, 1, 12)
assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
print("good")
"""


def test_muon_trains_the_blocks_matrices_adamw_the_rest_and_both_resume_exactly() -> None:
    """In a process of its own: Muon multiplies in bf16, for which some virtual CPUs claim instructions they lack."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", MUON], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "good\n", done.stderr


def test_momentum_without_muon_is_refused() -> None:
    with pytest.raises(ConfigError, match="Muon's"):
        InnerConfig(momentum=0.9)


def test_muon_on_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="use adamw"):
        inner_optimizer(torch.nn.Linear(3, 3), InnerConfig(optimizer="muon"))
