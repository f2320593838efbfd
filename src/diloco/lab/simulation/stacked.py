"""k replicas computed together: the parameters of all of them are one tensor [k, N].

A step of k small models is then as few kernels as a step of one, each k times as large; on a GPU the whole step, from
the windows' places to the inner optimizer, is one CUDA graph without a question to the host. DiLoCo sees k ordinary
models, whose parameters are views of the rows.

A row has the embedding (and output matrix), then the matrices of the blocks, then the norms. q, k and v lie side by
side and are one matrix product. Weights are fp32; on a GPU matrices and activations are
bf16, as in the product (models/native/transformer.py), and so is the loss (models/native/head.py).

Letters: k replicas, B sequences, T tokens, D width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.lab.layout import Layout
from diloco.lab.simulation.inner import StackedInner
from diloco.lab.simulation.replicas import Beginning, Replicas, Task
from diloco.lab.simulation.stacked_head import stacked_losses
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from diloco.models.native.transformer import rotary_tables, rotate
from diloco.training.inner import inner_optimizer

_WARM_UP = 3


class Network:
    """Hidden states of k replicas as a function of their parameters [k, N]."""

    def __init__(self, config: ModelConfig, layout: Layout, device: torch.device) -> None:
        self.config = config
        self.layout = layout
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rotary = tuple(table.to(self.dtype) for table in rotary_tables(config, device))

    def hidden(self, flat: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised hidden states [k, B · T, D], and the output matrix [k, V, D]."""
        c = self.config
        (k, B, T) = tokens.shape
        outside, matrices, vectors = self._parts(flat)
        embedding = outside[:, : c.vocab_size * c.hidden_size].reshape(k * c.vocab_size, c.hidden_size)
        rows = tokens + torch.arange(k, device=tokens.device)[:, None, None] * c.vocab_size
        x = torch.index_select(embedding, 0, rows.reshape(-1)).view(k, B * T, -1).to(self.dtype)
        cos, sin = (table[:T] for table in self.rotary)
        for layer in range(c.num_layers):
            x = self._block(layer, x, matrices, vectors, (cos, sin), (k, B, T))
        first = 0 if c.tie_embeddings else c.vocab_size * c.hidden_size
        head = outside[:, first : first + c.vocab_size * c.hidden_size].view(k, c.vocab_size, c.hidden_size)
        return self._norm(x, vectors["model.norm.weight"]), head.to(self.dtype)

    def _parts(self, flat: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """One split and one cast each, so that the gradient is written once."""
        layout = self.layout
        sizes = [stop - start for start, stop in (layout.outside, layout.matrices, layout.vectors)]
        outside, matrices, vectors = torch.split(flat, sizes, 1)
        shapes = {n: tuple(shape) for n, (at, shape) in layout.places.items() if at >= layout.vectors[0]}
        return outside, _cut(matrices.to(self.dtype), layout.products), _cut(vectors, shapes)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return (wide * scale * weight[:, None]).to(x.dtype)

    def _block(
        self,
        layer: int,
        x: Tensor,
        matrices: dict[str, Tensor],
        vectors: dict[str, Tensor],
        rotary: tuple[Tensor, Tensor],
        shape: tuple[int, int, int],
    ) -> Tensor:
        (k, B, T) = shape
        c = self.config

        def project(label: str, into: Tensor) -> Tensor:
            return torch.bmm(into, matrices[f"{layer}.{label}"].transpose(1, 2))

        normed = self._norm(x, vectors[f"model.layers.{layer}.input_layernorm.weight"])
        qkv = project("qkv", normed).view(k * B, T, -1, c.head_dim).transpose(1, 2)  # (k · B, heads, T, head_dim)
        turned, value = torch.split(qkv, [c.num_heads + c.num_kv_heads, c.num_kv_heads], 1)
        q, key = torch.split(rotate(turned, *rotary), [c.num_heads, c.num_kv_heads], 1)
        grouped = c.num_heads != c.num_kv_heads
        out = F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=grouped)
        x = x + project("out", out.transpose(1, 2).reshape(k, B * T, -1))
        normed = self._norm(x, vectors[f"model.layers.{layer}.post_attention_layernorm.weight"])
        return x + project("down", F.silu(project("gate", normed)) * project("up", normed))


def _cut(part: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """[k, n] into tensors [k, …] one after another; what is left is padding."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    pieces = torch.split(part, [*sizes, part.shape[1] - sum(sizes)], 1)
    named = zip(shapes.items(), pieces, strict=False)
    return {name: piece.view(part.shape[0], *shape) for (name, shape), piece in named}


def allow_many_shapes() -> None:
    """Every shape is compiled by itself, and a process may simulate many arms."""
    import torch._dynamo.config as config  # it takes a second

    limits: Any = config
    limits.recompile_limit = max(limits.recompile_limit, 1024)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8192)


@lru_cache
def _hidden_function(config: ModelConfig, device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`Network.hidden`, compiled on a GPU; all arms of a process with the same model share it, and what it compiled."""
    hidden = Network(config, Layout(config), device).hidden
    if device.type != "cuda":
        return hidden
    allow_many_shapes()
    compiled: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = torch.compile(hidden, dynamic=False, fullgraph=True)
    return compiled


class Stack:
    """Some replicas as one tensor, and their step."""

    def __init__(self, task: Task, beginning: Beginning, first: int, stop: int, losses: Tensor) -> None:
        device = task.places.device
        self.task = task
        self._columns = slice(first, stop)
        self._losses = losses
        self.layout = Layout(task.config)
        k = stop - first
        self.flat = torch.zeros(k, self.layout.numel, device=device)
        self.layout.fill(self.flat[0], beginning.parameters)
        self.flat[1:] = self.flat[0]
        self.inner = StackedInner(task.inner, self.layout, self.flat, beginning, masked=task.masked)
        self._hidden = _hidden_function(task.config, device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def compute_step(self) -> None:
        """Compute a step on the device alone: the next windows, losses, gradients, clipping, inner optimizer."""
        task = self.task
        places = task.places.index_select(0, self.counter)[0, self._columns]
        tokens = task.text.batch(places, task.length)
        leaf = self.flat.detach().requires_grad_()
        hidden, head = self._hidden(leaf, tokens[:, :, :-1])
        losses = stacked_losses(hidden, head, tokens[:, :, 1:].flatten(1))
        [gradient] = torch.autograd.grad(losses.sum(), leaf)
        with torch.no_grad():
            self._losses[:, self._columns].index_copy_(0, self.counter, losses.detach()[None])
            self.inner.update(self.flat, gradient, task.rates.index_select(0, self.counter))
            self.counter.add_(1)

    def step(self, pool: Any) -> Any:
        """One step; on a GPU as a graph that is captured at the first one, in the memory `pool`, which is returned."""
        if self.flat.device.type != "cuda":
            self.compute_step()
            return None
        if self._graph is None:
            self._graph = self._capture(pool)
        self._graph.replay()
        return self._graph.pool()

    def _capture(self, pool: Any) -> torch.cuda.CUDAGraph:
        """Compile and warm up on a second stream, with the state as it was afterwards."""
        changed = [self.flat, self.counter, self._losses, *self.inner.memory]
        before = [tensor.clone() for tensor in changed]
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self.compute_step()
                self.counter.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        del before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.compute_step()
        return graph


class Stacked(Replicas):
    """Stacks of `size` replicas each, one stack after another."""

    def __init__(self, task: Task, beginning: Beginning, size: int | None = None) -> None:
        k = task.replicas
        size = k if size is None else size
        self.how = f"stacked {size}"
        self.losses = torch.zeros(task.places.shape[:2], device=task.places.device)
        self.stacks = [Stack(task, beginning, first, min(k, first + size), self.losses) for first in range(0, k, size)]
        rows = [(stack, row) for stack in self.stacks for row in stack.flat]
        with torch.device("meta"):
            empty = NativeModel(task.config)  # made once: without memory, but its random numbers cost time all the same
        self.models = [_model(empty, stack.layout.views(row)) for stack, row in rows]
        views = [view for stack in self.stacks for view in stack.inner.views()]
        self.inners = [_inner(model, task, state) for model, state in zip(self.models, views, strict=True)]
        self._active: Sequence[bool] | None = None

    def take_step(self, active: Sequence[bool] | None = None) -> None:
        if active != self._active:
            first = 0
            for stack in self.stacks:
                stop = first + len(stack.flat)
                stack.inner.set_active(None if active is None else active[first:stop])
                first = stop
            self._active = active
        pool = None
        for stack in self.stacks:
            pool = stack.step(pool)

    def memory(self) -> dict[str, Tensor]:
        tensors = {"losses": self.losses}
        for number, stack in enumerate(self.stacks):
            changed = [stack.flat, stack.counter, *stack.inner.memory]
            tensors |= {f"{number}/{index}": tensor for index, tensor in enumerate(changed)}
        return tensors

    def load(self, saved: Mapping[str, Tensor], steps: int) -> None:
        """Load in place: parameters and inner states are views of this memory, and so is what a CUDA graph reads."""
        del steps  # each stack's counter has it
        for name, tensor in self.memory().items():
            tensor.copy_(saved[name])

    def saved(self) -> Beginning:
        stack = self.stacks[0]
        parameters = {name: view.clone() for name, view in stack.layout.views(stack.flat[0]).items()}
        return Beginning(parameters, *stack.inner.saved())


def _inner(model: nn.Module, task: Task, state: Mapping[str, dict[str, Tensor]]) -> torch.optim.Optimizer:
    """The product's inner optimizer over the stack's memory: DiLoCo may look into its state. It is never stepped."""
    inner = inner_optimizer(model, task.inner)
    for name, parameter in model.named_parameters():
        inner.state[parameter] = state[name]
    return inner


def _model(empty: NativeModel, parameters: dict[str, Tensor]) -> NativeModel:
    """A module over these tensors."""
    model = deepcopy(empty)
    for name, tensor in parameters.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(tensor.detach()))
    model.model.reset_rotary(tensor.device)
    return model
