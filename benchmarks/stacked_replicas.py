"""k replicas of a small model on one device, computed together: what benchmarks/codec_quality.py trains.

The parameters of all replicas are one tensor each, [k, …], so that an inner step of all of them is a few hundred
kernels and not k times as many. DiLoCo sees k ordinary models, whose parameters are views of these tensors, over the
local engine: outer gradients, codecs, error feedback and outer steps are the product's own.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.engines.local import LocalSwarm
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import Transformer, rotary_tables, rotate
from diloco.optimizer import DiLoCo


class Replicas:
    """`stacked` has the parameters [k, …] by name; `models[i]` is a module over their i-th rows."""

    def __init__(self, config: ModelConfig, k: int, start: dict[str, Tensor], device: torch.device) -> None:
        self.config, self.k, self.device = config, k, device
        self.stacked = {
            name: one.to(device).expand(k, *one.shape).clone().requires_grad_() for name, one in start.items()
        }
        self.rotary = rotary_tables(config, device)
        self.models = []
        for index in range(k):
            with torch.device("meta"):
                model = Transformer(config)
            for name, tensor in self.stacked.items():
                path, _, last = name.rpartition(".")
                setattr(model.get_submodule(path), last, torch.nn.Parameter(tensor.detach()[index]))
            self.models.append(model)

    def losses(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of each replica on its own batch: tokens [k, B, T + 1] to [k]."""
        c, p, k = self.config, self.stacked, self.k
        B, T = tokens.shape[1], tokens.shape[2] - 1
        cos, sin = (table[:T] for table in self.rotary)
        embedding = p["model.embed_tokens.weight"]
        flat = (tokens[:, :, :-1] + torch.arange(k, device=self.device)[:, None, None] * c.vocab_size).reshape(-1)
        x = F.embedding(flat, embedding.reshape(-1, c.hidden_size)).view(k, B * T, c.hidden_size)

        def project(name: str, into: Tensor) -> Tensor:
            return torch.bmm(into, p[name].transpose(1, 2))

        def norm(name: str, of: Tensor) -> Tensor:
            scale = torch.rsqrt(of.square().mean(-1, keepdim=True) + c.norm_eps)
            return of * scale * p[name][:, None, :]

        def heads(values: Tensor) -> Tensor:
            return values.view(k * B, T, -1, c.head_dim).transpose(1, 2)

        for layer in range(c.num_layers):
            base = f"model.layers.{layer}."
            normed = norm(base + "input_layernorm.weight", x)
            q, key, v = (heads(project(f"{base}self_attn.{n}_proj.weight", normed)) for n in "qkv")
            q, key = rotate(q, cos, sin), rotate(key, cos, sin)
            out = F.scaled_dot_product_attention(q, key, v, is_causal=True, enable_gqa=True)
            x = x + project(f"{base}self_attn.o_proj.weight", out.transpose(1, 2).reshape(k, B * T, -1))
            normed = norm(base + "post_attention_layernorm.weight", x)
            wide = F.silu(project(f"{base}mlp.gate_proj.weight", normed)) * project(f"{base}mlp.up_proj.weight", normed)
            x = x + project(f"{base}mlp.down_proj.weight", wide)
        logits = torch.bmm(norm("model.norm.weight", x), embedding.transpose(1, 2))
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, :, 1:].reshape(-1), reduction="none")
        return each.view(k, -1).mean(1)

    def optimizers(self, sync: SyncConfig, outer: OuterOptimizer) -> list[DiLoCo]:
        """One for each replica; their inner optimizers do nothing, since all replicas are stepped together."""
        made = []
        for model, engine in zip(self.models, LocalSwarm(self.k).engines(), strict=True):
            made.append(DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.0), engine, sync=sync, outer=outer))
        return made

    def clip(self, largest: float) -> None:
        """Each replica's gradient to at most this norm."""
        gradients = [tensor.grad for tensor in self.stacked.values() if tensor.grad is not None]
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
        factors = (largest / squares.sqrt().clamp(min=1e-9)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factors.view(-1, *(1 for _ in g.shape[1:])))


def start_of(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.detach().clone() for name, tensor in Transformer(config).named_parameters()}


def batches(tokens: Tensor, k: int, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """For ever: [k, size, length + 1] tokens from random places, the same for the same seed."""
    generator = np.random.default_rng(seed)
    offsets = torch.arange(length + 1, device=tokens.device)
    while True:
        starts = torch.from_numpy(generator.integers(0, len(tokens) - length - 1, (k, size))).to(tokens.device)
        yield tokens[starts[..., None] + offsets]
