"""Generates tokens with a model, one after the other, with a key/value cache.

Greedy at temperature 0, otherwise sampled from the `top_k` most likely tokens. The model sees at most
`max_sequence_length` tokens: of a longer prompt only the end is read, and when the window is full its older half is
dropped and the newer half is read again (one long step every half window; the cached keys and values of later layers
depend on the dropped tokens, so they cannot be reused).

Refused: an empty prompt, tokens outside the vocabulary, and a model whose logits are not finite. It does not know
tokenizers. The model generates in evaluation mode (no dropout), then returns to its former mode.
"""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.models.base import LanguageModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int | None = 50
    """Sample from the k likeliest tokens; None: from all."""
    generator: torch.Generator | None = None
    """A generator on the CPU, where the sampling happens, whatever the model's device; None is torch's global one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}: it must be finite and at least 0; 0 takes the likeliest token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k is {self.top_k}: it must be at least 1; leave it out (None) to sample from all tokens"
            )


def generate(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Container[int] = (),
) -> list[int]:
    """Generate tokens; returns them without the prompt and without the stop token that ended them."""
    return list(stream(model, prompt_tokens, max_new_tokens, sampling or Sampling(), stop_tokens))


def stream(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_tokens: Container[int] = (),
) -> Iterator[int]:
    """Generate tokens, each yielded as soon as it is chosen. Bad input is refused at once, not at the first token."""
    _check_prompt(prompt_tokens, model.vocab_size)
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}: it must be at least 0")
    return _stream(model, list(prompt_tokens), max_new_tokens, sampling, stop_tokens)


def _stream(
    model: LanguageModel, tokens: list[int], max_new_tokens: int, sampling: Sampling, stop_tokens: Container[int]
) -> Iterator[int]:
    longest = len(tokens) + max_new_tokens
    window = min(longest, model.max_sequence_length or longest)
    unread = tokens[-window:]
    was_training = model.training
    model.eval()
    try:
        reader = model.reader(window)
        for _ in range(max_new_tokens):
            if reader.length + len(unread) > window:
                reader.reset()
                unread = tokens[-max(1, window // 2) :]
            with torch.no_grad():
                logits = reader.read(unread)
            token = _choose(logits.float().cpu(), sampling)
            if token in stop_tokens:
                return
            tokens.append(token)
            unread = [token]
            yield token
    finally:
        model.train(was_training)


def _choose(logits: Tensor, sampling: Sampling) -> int:
    """Choose one token from logits (V,)."""
    if not bool(logits.max().isfinite()):
        raise ConfigError("the model's logits are not finite: it cannot generate text; its weights are damaged")
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    # Subtracting the largest first, in fp64, keeps a tiny temperature from giving infinities or 0/0.
    probabilities = ((values - values[0]).double() / sampling.temperature).softmax(dim=-1)
    return int(candidates[torch.multinomial(probabilities, 1, generator=sampling.generator)])


def _check_prompt(prompt_tokens: Sequence[int], vocab_size: int) -> None:
    if not prompt_tokens:
        raise ConfigError("the prompt has no tokens: a model continues at least one; give some text")
    for token in prompt_tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"the prompt has token {token}: this model's vocabulary is 0 to {vocab_size - 1}; "
                f"encode the prompt with the tokenizer that the model was trained with"
            )
