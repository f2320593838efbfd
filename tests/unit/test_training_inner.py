"""AdamW's groups and its learning rate over a run."""

import math

import pytest
import torch

from diloco.models.config import ModelConfig
from diloco.models.transformer import Transformer
from diloco.training.config import InnerConfig
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
