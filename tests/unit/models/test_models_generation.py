"""Generation: the cache changes nothing, the window slides by halves, the seed decides, a token stops it."""

import copy

import pytest
import torch

from diloco.errors import ConfigError
from diloco.models.generation import Sampling, generate, stream
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_sequence_length=16,
    tie_embeddings=False,
)
PROMPT = [3, 14, 15, 9, 2]
GREEDY = Sampling(temperature=0)


@pytest.fixture
def model() -> NativeModel:
    torch.manual_seed(0)
    model = NativeModel(CONFIG)
    for parameter in model.parameters():
        # Weights as drawn predict nearly uniformly; larger ones make each choice depend on the whole context.
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def greedy_without_cache(model: NativeModel, prompt: list[int], count: int) -> list[int]:
    """The documented rule, read again from the start at every token."""
    window = CONFIG.max_sequence_length
    text = list(prompt)
    context = text[-window:]
    for _ in range(count):
        if len(context) > window:
            context = text[-(window // 2) :]
        token = int(model(torch.tensor([context]))[0, -1].argmax())
        text.append(token)
        context = [*context, token]
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt_length", [1, 5, 16, 40])
def test_cached_greedy_text_is_the_uncached_one_also_beyond_the_window(model: NativeModel, prompt_length: int) -> None:
    prompt = [(7 * i + 3) % CONFIG.vocab_size for i in range(prompt_length)]
    expected = greedy_without_cache(model, prompt, 40)
    assert len(set(expected)) > 3  # else the comparison would say little
    assert generate(model, prompt, max_new_tokens=40, sampling=GREEDY) == expected


def test_the_generator_alone_decides_the_sample(model: NativeModel) -> None:
    def sample(seed: int) -> list[int]:
        return generate(
            model, PROMPT, max_new_tokens=30, sampling=Sampling(generator=torch.Generator().manual_seed(seed))
        )

    first = sample(1)
    torch.manual_seed(99)
    assert sample(1) == first
    assert sample(2) != first


def test_top_k_of_one_and_a_tiny_temperature_are_greedy(model: NativeModel) -> None:
    greedy = generate(model, PROMPT, max_new_tokens=20, sampling=GREEDY)
    assert generate(model, PROMPT, max_new_tokens=20, sampling=Sampling(5.0, top_k=1)) == greedy
    assert generate(model, PROMPT, max_new_tokens=20, sampling=Sampling(1e-40, top_k=None)) == greedy


def test_top_k_keeps_all_samples_within_the_k_likeliest_tokens(model: NativeModel) -> None:
    likeliest = set(model(torch.tensor([PROMPT]))[0, -1].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)

    def first_tokens(top_k: int | None) -> set[int]:
        samples = [
            generate(model, PROMPT, max_new_tokens=1, sampling=Sampling(9.0, top_k, generator)) for _ in range(60)
        ]
        return {sample[0] for sample in samples}

    assert first_tokens(3) == likeliest
    assert len(first_tokens(None)) > 3


def test_the_stop_token_ends_the_text_and_is_not_part_of_it(model: NativeModel) -> None:
    greedy = generate(model, PROMPT, max_new_tokens=20, sampling=GREEDY)
    stop = greedy[4]
    expected = greedy[: greedy.index(stop)]
    assert generate(model, PROMPT, max_new_tokens=20, sampling=GREEDY, stop_tokens={stop}) == expected


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_gradients_and_prompt_are_left_as_they_were(model: NativeModel, training: bool) -> None:
    model.train(training)
    prompt = list(PROMPT)
    generate(model, prompt, max_new_tokens=3)
    assert all(module.training is training for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert prompt == PROMPT
    assert torch.is_grad_enabled()


def test_a_stream_gives_each_token_as_it_is_chosen_and_refuses_bad_input_at_once(model: NativeModel) -> None:
    expected = generate(model, PROMPT, max_new_tokens=6, sampling=GREEDY)
    tokens = stream(model, PROMPT, 6, GREEDY)
    assert [next(tokens) for _ in range(2)] == expected[:2]
    assert list(tokens) == expected[2:]
    with pytest.raises(ConfigError, match="no tokens"):
        stream(model, [], 6, GREEDY)


def test_the_former_mode_comes_back_when_a_stream_is_left_early(model: NativeModel) -> None:
    model.train()
    tokens = stream(model, PROMPT, 6, GREEDY)
    next(tokens)
    assert not model.training  # a model with dropout writes without it
    tokens.close()  # type: ignore[attr-defined]
    assert model.training


def test_no_new_tokens_asked_for_gives_none(model: NativeModel) -> None:
    assert generate(model, PROMPT, max_new_tokens=0) == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_computes_no_numbers_cannot_write(model: NativeModel, temperature: float) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(float("nan"))
    with pytest.raises(ConfigError, match="not finite: it cannot generate text"):
        generate(broken, [1, 2], max_new_tokens=2, sampling=Sampling(temperature))


def test_bad_input_is_refused_with_the_value_and_the_rule(model: NativeModel) -> None:
    with pytest.raises(ConfigError, match=r"no tokens.*at least one"):
        generate(model, [], max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"token 50.*0 to 49"):
        generate(model, [3, 50], max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"max_new_tokens is -1.*at least 0"):
        generate(model, PROMPT, max_new_tokens=-1)
    with pytest.raises(ConfigError, match=r"temperature is -0.5.*at least 0"):
        Sampling(temperature=-0.5)
    with pytest.raises(ConfigError, match=r"top_k is 0.*at least 1"):
        Sampling(top_k=0)
