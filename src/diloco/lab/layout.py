"""Where each parameter of a replica lies in its row of a tensor [k, N].

The embedding (and output matrix) first, then the matrices of the blocks, then the norms. q, k and v are side by side
and are one matrix product. (Gate and up could be, but gathering their gradients costs more than it saves.)
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel

_ALIGNED = 64  # elements: rows begin at whole cache lines


class Layout:
    """The place of each parameter in a row."""

    def __init__(self, config: ModelConfig) -> None:
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in NativeModel(config).named_parameters()}
        outside = [name for name in shapes if len(shapes[name]) == 2 and ".layers." not in name]
        matrices = [name for name in shapes if len(shapes[name]) == 2 and ".layers." in name]
        vectors = [name for name in shapes if len(shapes[name]) == 1]
        self.places: dict[str, tuple[int, torch.Size]] = {}
        ends = [0]
        for part in (outside, matrices, vectors):
            end = ends[-1]
            for name in part:
                self.places[name] = (end, shapes[name])
                end += shapes[name].numel()
            ends.append(-(-end // _ALIGNED) * _ALIGNED)
        self.outside, self.matrices, self.vectors = pairwise(ends)
        self.numel = ends[-1]
        self.hidden_matrices = matrices
        self.products = self._products(config)

    def _products(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """The matrices of the blocks as they are multiplied, in order: [outputs, inputs] by label."""
        products: dict[str, tuple[int, int]] = {}
        for layer in range(config.num_layers):
            base = f"model.layers.{layer}."
            place = self.places
            names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
            in_order = [place[f"{base}{name}_proj.weight"] for name in names]
            assert all(a[0] + a[1].numel() == b[0] for a, b in pairwise(in_order))
            shapes = [(shape[0], shape[1]) for _, shape in in_order]
            products[f"{layer}.qkv"] = (sum(rows for rows, _ in shapes[:3]), config.hidden_size)
            products |= {
                f"{layer}.{name}": shape for name, shape in zip(("out", "gate", "up", "down"), shapes[3:], strict=True)
            }
        return products

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The parameters in one row."""
        return {name: row[at : at + shape.numel()].view(shape) for name, (at, shape) in self.places.items()}

    def fill(self, row: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, view in self.views(row).items():
            if name in values:
                view.copy_(values[name])
