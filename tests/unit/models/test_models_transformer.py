"""What the model computes: causal, grouped, tied, initialised from the seed, and traced without breaks."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.head import next_token_loss
from diloco.models.native.transformer import KeyValueCache, Transformer

GROUPED = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_sequence_length=24,
    tie_embeddings=True,
)


def make(config: ModelConfig = GROUPED, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config)


def some_tokens(batch: int = 2, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, GROUPED.vocab_size, (batch, length), generator=generator)


def test_changing_a_later_token_changes_no_earlier_logits_but_its_own() -> None:
    model, tokens = make(), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % GROUPED.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-4)


def test_the_order_of_earlier_tokens_matters_so_positions_reach_the_attention() -> None:
    model = make(replace(GROUPED, num_layers=1))
    # One layer without positions would see the same set of earlier tokens.
    first, second = torch.tensor([[3, 5, 9]]), torch.tensor([[5, 3, 9]])
    assert not torch.allclose(model(first)[:, -1], model(second)[:, -1], atol=1e-6)


def test_the_loss_is_the_mean_negative_log_probability_of_the_targets() -> None:
    model, tokens = make(), some_tokens(length=13)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs).detach().double()
    total = 0.0
    for row in range(inputs.shape[0]):
        for position in range(inputs.shape[1]):
            scores = logits[row, position]
            total += float(scores.exp().sum().log() - scores[targets[row, position]])
    assert float(model.loss(inputs, targets).detach()) == pytest.approx(total / inputs.numel(), rel=1e-6)


def test_a_new_model_predicts_nearly_uniformly() -> None:
    tokens = some_tokens(length=13)
    loss = float(make().loss(tokens[:, :-1], tokens[:, 1:]).detach())
    assert loss == pytest.approx(math.log(GROUPED.vocab_size), abs=0.1)


def test_the_loss_is_fp32_when_the_logits_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator).half()
    matrix = torch.randn(50, 16, generator=generator).half()
    targets = torch.randint(0, 50, (7,), generator=generator)
    loss = next_token_loss(hidden, matrix, targets)
    assert loss.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, matrix)
    assert logits.dtype == torch.float16
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(logits.double(), targets)), rel=1e-6)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, second, other = make(seed=1).state_dict(), make(seed=1).state_dict(), make(seed=2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_residual_projections_start_smaller_by_the_square_root_of_twice_the_layers() -> None:
    config = replace(GROUPED, hidden_size=128, num_layers=8)
    attention = make(config).model.layers[0].self_attn
    assert float(attention.q_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(attention.o_proj.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_every_stored_tensor_is_a_parameter_of_its_own_storage(tied: bool) -> None:
    model = make(replace(GROUPED, tie_embeddings=tied))
    state = model.state_dict()
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    assert ("lm_head.weight" in state) is not tied


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient(tied: bool) -> None:
    model, tokens = make(replace(GROUPED, tie_embeddings=tied)), some_tokens()
    model.loss(tokens, tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_cached_forward_in_pieces_gives_the_logits_of_one_forward() -> None:
    model, tokens = make(), some_tokens()
    cache = KeyValueCache(GROUPED, batch_size=2, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        pieces = [model(tokens[:, start:end], cache) for start, end in [(0, 5), (5, 6), (6, 10), (10, 12)]]
        whole = model(tokens)
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-6, rtol=1e-5)


def test_more_tokens_than_the_model_has_positions_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"25 tokens.*at most 24"):
        make()(some_tokens(length=25))


def test_the_loss_is_one_graph_for_torch_compile() -> None:
    model, tokens = make(), some_tokens()
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens, tokens), model.loss(tokens, tokens))
