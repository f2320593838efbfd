"""A decoder-only transformer of the Llama family, whose weights are named and shaped as Hugging Face's.

RMSNorm (arXiv 1910.07467), rotary positions (2104.09864) in Hugging Face's half-rotation convention, SwiGLU
(2002.05202), grouped key/value heads (2305.13245), no biases, no dropout. The head size is free and the
embeddings may be tied; a tied model has no `lm_head` tensor, as in the files that `transformers` writes, so every
tensor of `state_dict()` is stored once.

Under bf16 autocast the residual stream is bf16 too, which is worth 5 % of a step on a GPU; sums inside norms and
the loss stay fp32, and so do the weights.

Refused: more tokens than the rotary tables have positions. A new `Transformer` draws its weights from torch's global
generator, which the caller seeds.

Letters: B batch, T tokens, S tokens so far (cache and new), D head size, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.head import next_token_loss

INITIAL_STD = 0.02


class KeyValueCache:
    """The keys and values of all tokens so far, for generation. Allocated once, for the longest sequence."""

    def __init__(self, config: ModelConfig, *, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (batch_size, config.num_kv_heads, config.max_sequence_length, config.head_dim)
        self.length = 0  # how many tokens are in it
        self._keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self._values = [torch.empty_like(keys) for keys in self._keys]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new tokens of one layer, (B, heads, T, D); returns all S so far, (B, heads, S, D).

        `length` moves only when every layer has stored its part: `Decoder.forward` does that.
        """
        end = self.length + keys.shape[2]
        self._keys[layer][:, :, self.length : end] = keys
        self._values[layer][:, :, self.length : end] = values
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]


class Projection(nn.Linear):
    """A matrix without bias that draws its initial weights from a normal distribution, once."""

    def __init__(self, inputs: int, outputs: int, *, std: float = INITIAL_STD) -> None:
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Token vectors with this model's initial distribution."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class RMSNorm(nn.Module):
    """x / rms(x) · weight: computed in fp32, returned in x's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def residual_std(config: ModelConfig) -> float:
    """Return the deviation of the two matrices of a layer that add to the residual stream: its variance then starts the
    same at any depth (GPT-2, section 2.3)."""
    return INITIAL_STD / math.sqrt(2 * config.num_layers)


def rotary_tables(config: ModelConfig, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each (max_sequence_length, D), for `rotate`."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents  # (D/2,)
    positions = torch.arange(config.max_sequence_length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # (max_sequence_length, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + D/2}) by their position's angles. x: (B, heads, T, D); tables: (T, D)."""
    # Rolling by half a head swaps the pair's members; the minus sign of one of them is in the table.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


class Attention(nn.Module):
    """Causal self-attention in which each key/value head serves num_heads / num_kv_heads heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.grouped = config.num_heads != config.num_kv_heads
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = Projection(config.hidden_size, query_width)
        self.k_proj = Projection(config.hidden_size, kv_width)
        self.v_proj = Projection(config.hidden_size, kv_width)
        self.o_proj = Projection(query_width, config.hidden_size, std=residual_std(config))

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None, mask: Tensor | None
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, num_heads, T, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, num_kv_heads, T, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        cos, signed_sin = rotary[0].to(q.dtype), rotary[1].to(q.dtype)  # under autocast q has a short type
        q, k = rotate(q, cos, signed_sin), rotate(k, cos, signed_sin)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
        return projected


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None, mask: Tensor | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, cache, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Everything below the output matrix: tokens (B, T) to normalised hidden states (B, T, hidden_size)."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.reset_rotary(self.embed_tokens.weight.device)

    def reset_rotary(self, device: torch.device) -> None:
        """Compute the rotary tables, which are not saved. A model built on `meta` needs this a second time."""
        cos, signed_sin = rotary_tables(self.config, device)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", signed_sin, persistent=False)

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        T = tokens.shape[1]
        start = 0 if cache is None else cache.length
        if start + T > self.config.max_sequence_length:
            raise ConfigError(
                f"the sequence has {start + T} tokens: this model takes at most "
                f"{self.config.max_sequence_length} (max_sequence_length); give it fewer"
            )
        rotary = (self.rotary_cos[start : start + T], self.rotary_sin[start : start + T])
        mask = None
        if cache is not None:  # new token t sees the cached ones, itself, and the new ones before it: (T, S)
            mask = torch.ones(T, start + T, dtype=torch.bool, device=tokens.device).tril(start)
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # fp16 would overflow here; bf16 has fp32's range
        for block in self.layers:
            x = block(x, rotary, cache, mask)
        if cache is not None:
            cache.length += T
        normed: Tensor = self.norm(x)
        return normed


class Transformer(nn.Module):
    """A causal language model. Its `state_dict()` is that of a Hugging Face `LlamaForCausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tie_embeddings else Projection(config.hidden_size, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        targets: Tensor | None = None,
        learnt: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits (B, T, V) of the token after each of tokens (B, T), int64, which continue the cache.

        With targets (B, T): their mean cross entropy instead, or that of the flattened targets `learnt`. Both are calls
        of the module, so that FSDP's all-gather and hooks take effect.
        """
        hidden = self.model(tokens, cache)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        if targets is not None:
            hidden = hidden.flatten(0, 1)
            targets = targets.flatten()
            if learnt is not None:  # the logits of the others are not even computed
                hidden = hidden[learnt]
                targets = targets[learnt]
            return next_token_loss(hidden, head.weight, targets)
        return F.linear(hidden, head.weight)

    def loss(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor:
        """Compute the mean cross entropy in nats, in fp32 whatever the logits' type. tokens, targets: (B, T), int64;
        `learnt`: only of the targets at these indices of the flattened targets."""
        loss: Tensor = self(tokens, targets=targets, learnt=learnt)
        return loss
