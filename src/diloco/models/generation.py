"""Write text with a model, one token after the other, with a key/value cache.

Greedy at temperature 0, otherwise sampled from the `top_k` most likely tokens. What falls out: the model sees
at most `max_sequence_length` tokens, so of a longer prompt only the end is read, and when the text has filled
the window its older half is forgotten and the newer half is read again (one longer step every half window,
not at every token: cached keys and values of later layers depend on what fell out, so they cannot be kept).

What it refuses: an empty prompt and tokens outside the vocabulary. It knows nothing of tokenizers, and leaves
the model's train/eval mode alone: the model has no dropout, so the mode changes nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.models.transformer import KeyValueCache, Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
) -> list[int]:
    """The new tokens, without the prompt and without the stop token that ended them.

    `generator` lives on the CPU (sampling happens there, whatever the model's device); None is torch's global
    one. `top_k` None samples from the whole vocabulary.
    """
    _check_prompt(prompt_tokens, model.config.vocab_size)
    _check_sampling(max_new_tokens, temperature, top_k)
    weight = model.model.embed_tokens.weight
    window = model.config.max_sequence_length
    text = list(prompt_tokens)
    unread = text[-window:]
    cache = KeyValueCache(model.config, batch_size=1, device=weight.device, dtype=weight.dtype)
    for _ in range(max_new_tokens):
        if cache.length + len(unread) > window:
            cache.length = 0
            unread = text[-max(1, window // 2) :]
        logits = model(torch.tensor([unread], device=weight.device), cache)[0, -1]
        token = _choose(logits.float().cpu(), temperature, top_k, generator)
        if token == stop_token:
            break
        text.append(token)
        unread = [token]
    return text[len(prompt_tokens) :]


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    """One token from logits (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.topk(min(top_k or len(logits), len(logits)))
    # Subtracting the largest first keeps a tiny temperature from turning the quotients into infinities.
    probabilities = ((values - values[0]) / temperature).softmax(dim=-1)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


def _check_prompt(prompt_tokens: Sequence[int], vocab_size: int) -> None:
    if not prompt_tokens:
        raise ConfigError("the prompt has no tokens: a model goes on from at least one; give it some text")
    for token in prompt_tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"the prompt has token {token}: this model's vocabulary is 0 to {vocab_size - 1}; "
                f"encode the prompt with the tokenizer that the model was trained with"
            )


def _check_sampling(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}: it must be at least 0")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(
            f"temperature is {temperature}: it must be finite and at least 0; 0 takes the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}: it must be at least 1; leave it out (None) to sample from all tokens")
