"""k replicas computed together: the parameters of all of them are one tensor [k, N].

A step of k small models is then as few kernels as a step of one, each k times as large; on a GPU the whole step, from
the windows' places to the inner optimizer, is one CUDA graph without a question to the host. DiLoCo sees k ordinary
models, whose parameters are views of the rows.

    Layout          where each parameter lies in its row
    Network         the forward pass of all replicas up to the hidden states
    stacked_losses  their cross entropies, without keeping the logits
    StackedInner    AdamW and Muon on all rows, with a step count for each replica
    Stack, Stacked  the step of one stack, and the stacks of an arm as `Replicas`

Weights are fp32; on a GPU matrices and activations are bf16, as in the product (models/native/transformer.py), and so
is the loss (models/native/head.py). The results are the product's up to rounding. Why torch.func over the product's
model does not do it: ADR 34.

Letters: k replicas, B sequences, T tokens, R = B · T rows, D width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.core.gpu import has_triton
from diloco.lab.simulation.replicas import Beginning, Replicas, ReplicaTask
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from diloco.models.native.transformer import rotary_tables, rotate
from diloco.training.config.run import InnerConfig
from diloco.training.inner import MUON_MOMENTUM, inner_optimizer

ROWS_AT_ONCE = 16384
"""Rows of logits that are computed at a time, as in models/native/head.py."""
_WARM_UP_STEPS = 3
_ALIGNED = 64  # elements: rows begin at whole cache lines
_EPSILON = 1e-8  # AdamW's
_MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch.optim.Muon, as the next two
_MUON_STEPS = 5
_MUON_EPSILON = 1e-7
_CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


# The parameters in a row


class Layout:
    """The place of each parameter in a row [N]: first the embeddings, then the blocks' matrices, then the norms."""

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
        """Return the shapes [outputs, inputs] of the blocks' matrices, in order: those of queries, keys and values are
        multiplied as one."""
        products: dict[str, tuple[int, int]] = {}
        for layer in range(config.num_layers):
            base = f"model.layers.{layer}."
            place = self.places
            names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
            in_order = [place[f"{base}{name}_proj.weight"] for name in names]
            assert all(left[0] + left[1].numel() == right[0] for left, right in pairwise(in_order))
            shapes = [(shape[0], shape[1]) for _, shape in in_order]
            products[f"{layer}.qkv"] = (sum(rows for rows, _ in shapes[:3]), config.hidden_size)
            products |= {
                f"{layer}.{name}": shape for name, shape in zip(("out", "gate", "up", "down"), shapes[3:], strict=True)
            }
        return products

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the parameters in one row, as views of it."""
        return {name: row[at : at + shape.numel()].view(shape) for name, (at, shape) in self.places.items()}

    def fill(self, row: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, view in self.views(row).items():
            if name in values:
                view.copy_(values[name])


# The forward pass


class Network:
    """Hidden states of k replicas as a function of their parameters [k, N]."""

    def __init__(self, config: ModelConfig, layout: Layout, device: torch.device) -> None:
        self.config = config
        self.layout = layout
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rotary = tuple(table.to(self.dtype) for table in rotary_tables(config, device))

    def hidden(self, flat: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute normalised hidden states [k, B · T, D]. Returns also the output matrix [k, V, D]."""
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
        """Return embeddings, the blocks' matrices and norms: one split and one cast each, so that the gradient is
        written once."""
        layout = self.layout
        sizes = [stop - start for start, stop in (layout.outside, layout.matrices, layout.vectors)]
        outside, matrices, vectors = torch.split(flat, sizes, 1)
        shapes = {name: tuple(shape) for name, (at, shape) in layout.places.items() if at >= layout.vectors[0]}
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
        queries_and_keys, value = torch.split(qkv, [c.num_heads + c.num_kv_heads, c.num_kv_heads], 1)
        q, key = torch.split(rotate(queries_and_keys, *rotary), [c.num_heads, c.num_kv_heads], 1)
        grouped = c.num_heads != c.num_kv_heads
        out = F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=grouped)
        x = x + project("out", out.transpose(1, 2).reshape(k, B * T, -1))
        normed = self._norm(x, vectors[f"model.layers.{layer}.post_attention_layernorm.weight"])
        return x + project("down", F.silu(project("gate", normed)) * project("up", normed))


def _cut(stacked: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Cut [k, n] into tensors [k, …], one after another; the rest is padding."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    pieces = torch.split(stacked, [*sizes, stacked.shape[1] - sum(sizes)], 1)
    named_pieces = zip(shapes.items(), pieces, strict=False)
    return {name: piece.view(stacked.shape[0], *shape) for (name, shape), piece in named_pieces}


def allow_many_shapes() -> None:
    """Raise torch's limits of recompilation: each shape is compiled by itself, and a process may simulate many arms."""
    import torch._dynamo.config as config  # it takes a second

    limits: Any = config
    limits.recompile_limit = max(limits.recompile_limit, 1024)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8192)


@lru_cache
def _hidden_function(config: ModelConfig, device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return `Network.hidden`, compiled on a GPU. All arms of a process with the same model share it."""
    hidden = Network(config, Layout(config), device).hidden
    if device.type != "cuda":
        return hidden
    allow_many_shapes()
    compiled: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = torch.compile(hidden, dynamic=False, fullgraph=True)
    return compiled


def stacked_losses(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross entropy of each replica, [k] in fp32, of hidden [k, R, D], matrix [k, V, D] and targets
    [k, R]."""
    if hidden.is_cuda and has_triton() and hidden.dtype == torch.bfloat16:
        losses: Tensor = _FusedLosses.apply(hidden, matrix, targets)  # type: ignore[no-untyped-call]
        return losses
    logits = torch.bmm(hidden, matrix.transpose(1, 2)).float()
    losses_of_rows = F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), reduction="none")
    return losses_of_rows.view(hidden.shape[:2]).mean(1)


class _FusedLosses(torch.autograd.Function):
    """The gradient is computed in the forward pass, while the logits are there; backward only scales it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        from diloco.models.native.head_kernel import softmax_gradient_

        k, R, _ = hidden.shape
        targets = targets.contiguous()
        losses = torch.empty(k, R, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        matrix_gradient = torch.empty(matrix.shape, device=hidden.device)
        replicas_at_once = max(1, ROWS_AT_ONCE // R)
        rows = min(R, ROWS_AT_ONCE)
        for first_replica in range(0, k, replicas_at_once):
            replicas = slice(first_replica, first_replica + replicas_at_once)
            for first in range(0, R, rows):
                chunk = slice(first, first + rows)
                chunk_targets = targets[replicas, chunk].reshape(-1)
                chunk_losses = losses[replicas, chunk]
                logits = torch.bmm(hidden[replicas, chunk], matrix[replicas].transpose(1, 2))  # (replicas, rows, V)
                flat_losses = torch.empty(chunk_targets.numel(), device=hidden.device)
                softmax_gradient_(logits.flatten(0, 1), chunk_targets, flat_losses, 1.0 / R)
                chunk_losses.copy_(flat_losses.view(chunk_losses.shape))
                hidden_gradient[replicas, chunk] = torch.bmm(logits, matrix[replicas])
                chunk_gradient = torch.bmm(logits.transpose(1, 2), hidden[replicas, chunk])
                matrix_gradient[replicas] = chunk_gradient if first == 0 else matrix_gradient[replicas] + chunk_gradient
        ctx.save_for_backward(hidden_gradient, matrix_gradient)
        return losses.mean(1)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_gradient, matrix_gradient = ctx.saved_tensors
        factor = scale[:, None, None]
        return hidden_gradient * factor.to(hidden_gradient.dtype), matrix_gradient * factor, None


# The inner optimizers


class StackedInner:
    """AdamW or Muon on all rows of a stack, with the state of each replica."""

    def __init__(
        self, config: InnerConfig, layout: Layout, flat: Tensor, beginning: Beginning, *, masked: bool
    ) -> None:
        """`masked`: some steps will have replicas that are not active."""
        self.config = config
        self._layout = layout
        muon = config.optimizer == "muon"
        self._adamw: list[tuple[slice, float]] = [(slice(0, layout.vectors[0]), config.weight_decay)]
        if muon:
            self._adamw = [(slice(*layout.outside), config.weight_decay)]
        self._adamw.append((slice(*layout.vectors), 0.0))
        kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer") if muon else ("exp_avg", "exp_avg_sq")
        self._state = {kind: torch.zeros_like(flat) for kind in kinds}
        for kind, values in self._state.items():
            if kind in beginning.state:
                layout.fill(values[0], beginning.state[kind])
                values[1:] = values[0]
        self._steps = torch.full((len(flat), 1), float(beginning.steps), device=flat.device)
        self._active = torch.ones(len(flat), 1, dtype=torch.bool, device=flat.device)
        self._masked = masked
        self._shapes: dict[tuple[int, ...], list[str]] = {}
        for name in layout.hidden_matrices if muon else ():
            self._shapes.setdefault(tuple(layout.places[name][1]), []).append(name)
        self._update: Callable[..., None] = adamw_
        self._norms: Callable[[Tensor, float], Tensor] = clip_factors
        if flat.device.type == "cuda":
            self._update = torch.compile(adamw_, dynamic=False, fullgraph=True)
            self._norms = torch.compile(clip_factors, dynamic=False, fullgraph=True)

    @property
    def memory(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        return [*self._state.values(), self._steps]

    def set_active(self, active: Sequence[bool] | None) -> None:
        assert self._masked or active is None
        values = [True] * len(self._active) if active is None else list(active)
        self._active.copy_(torch.tensor(values)[:, None])

    def update(self, flat: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Take one step in `flat` along the gradient [k, N], clipped for each replica, with the learning rate [1]."""
        config = self.config
        active = self._active if self._masked else None
        if active is None:
            self._steps.add_(1)
        else:
            self._steps.add_(active)
        factor = None if config.clip_norm is None else self._norms(gradient, config.clip_norm)
        m = self._state["exp_avg"]
        v = self._state["exp_avg_sq"]
        for part, decay in self._adamw:
            self._update(
                flat[:, part], gradient[:, part], m[:, part], v[:, part], self._steps, rate, factor, active,
                decay, config.beta1, config.beta2,
            )  # fmt: skip
        for names in self._shapes.values():
            self._muon(names, flat, gradient, rate, factor)

    def _muon(self, names: list[str], flat: Tensor, gradient: Tensor, rate: Tensor, factor: Tensor | None) -> None:
        """Take a step of Muon for the matrices of one shape, of all layers and replicas, in one batch."""
        config = self.config
        k = len(flat)
        momentum = MUON_MOMENTUM if config.momentum is None else config.momentum
        theta, gradients, buffers = (
            self._matrices(names, stacked) for stacked in (flat, gradient, self._state["momentum_buffer"])
        )
        directions = []
        for matrix_gradient, momentum_buffer in zip(gradients, buffers, strict=True):
            clipped = matrix_gradient if factor is None else matrix_gradient * factor[:, :, None]
            updated = momentum_buffer.lerp(clipped, 1 - momentum)
            momentum_buffer.copy_(self._kept(updated, momentum_buffer))
            directions.append(clipped.lerp(updated, momentum))
        orthogonal = torch.split(orthogonalise(torch.cat(directions)), k)
        rows, columns = theta[0].shape[1:]
        scaled = rate * (0.2 * math.sqrt(max(rows, columns)))
        for parameter, direction in zip(theta, orthogonal, strict=True):
            updated = parameter * (1 - rate * config.weight_decay) - scaled * direction
            parameter.copy_(self._kept(updated, parameter))

    def _kept(self, updated: Tensor, former: Tensor) -> Tensor:
        return torch.where(self._active[:, :, None], updated, former) if self._masked else updated

    def _matrices(self, names: list[str], flat: Tensor) -> list[Tensor]:
        """Return the named matrices as views [k, rows, columns]."""
        matrices = []
        for name in names:
            at, shape = self._layout.places[name]
            matrices.append(torch.unflatten(flat[:, at : at + shape.numel()], 1, tuple(shape)))
        return matrices

    def views(self) -> list[dict[str, dict[str, Tensor]]]:
        """Return the state of each replica by parameter, as torch's optimizers have it: views of this memory."""
        states = []
        hidden = set(self._layout.hidden_matrices) if self.config.optimizer == "muon" else set()
        for row, steps in enumerate(self._steps):
            by_kind = {kind: self._layout.views(values[row]) for kind, values in self._state.items()}
            adamw = {"exp_avg", "exp_avg_sq"}
            state_by_parameter: dict[str, dict[str, Tensor]] = {}
            for name in self._layout.places:
                kinds = {"momentum_buffer"} if name in hidden else adamw
                state_by_parameter[name] = {kind: by_kind[kind][name] for kind in kinds}
                if name not in hidden:
                    state_by_parameter[name]["step"] = steps[0]
            states.append(state_by_parameter)
        return states

    def first_state(self) -> tuple[Mapping[str, Mapping[str, Tensor]], int]:
        """Copy the state and the steps of replica 0, as `Beginning` has them."""
        state_by_kind: dict[str, dict[str, Tensor]] = {}
        for name, state in self.views()[0].items():
            for kind, view in state.items():
                if kind != "step":
                    state_by_kind.setdefault(kind, {})[name] = view.clone()
        return state_by_kind, int(self._steps[0])


def clip_factors(gradient: Tensor, largest: float) -> Tensor:
    """Compute the factors [k, 1] that bring the norm of each replica's gradient [k, N] to at most `largest`."""
    norms = gradient.square().sum(1, keepdim=True).sqrt()
    return (largest / (norms + _CLIP_EPSILON)).clamp(max=1.0)


def adamw_(
    theta: Tensor, gradient: Tensor, m: Tensor, v: Tensor, steps: Tensor, rate: Tensor, factor: Tensor | None,
    active: Tensor | None, decay: float, beta1: float, beta2: float,
) -> None:  # fmt: skip
    """m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  θ ← (1 − η λ) θ − η m̂ / (√v̂ + ε). In place; steps [k, 1]."""
    g = gradient if factor is None else gradient * factor
    new_m = m + (g - m) * (1 - beta1)
    new_v = v * beta2 + g * g * (1 - beta2)
    m_scale = 1 - beta1**steps
    v_scale = (1 - beta2**steps).sqrt()
    moved = theta * (1 - rate * decay) - (rate / m_scale) * new_m / (new_v.sqrt() / v_scale + _EPSILON)
    if active is not None:
        new_m, new_v, moved = (torch.where(active, a, b) for a, b in ((new_m, m), (new_v, v), (moved, theta)))
    m.copy_(new_m)
    v.copy_(new_v)
    theta.copy_(moved)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Orthogonalise matrices [n, rows, columns] by Newton–Schulz in bf16, as torch.optim.Muon does for one matrix."""
    a, b, c = _MUON_COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.transpose(1, 2) if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_MUON_EPSILON)
    for _ in range(_MUON_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).float()


# The stacks


class Stack:
    """Some replicas as one tensor, and their step."""

    def __init__(self, task: ReplicaTask, beginning: Beginning, first: int, stop: int, losses: Tensor) -> None:
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
        """Take a step. On a GPU the first one is captured as a graph, in the memory `pool`, which is returned."""
        if self.flat.device.type != "cuda":
            self.compute_step()
            return None
        if self._graph is None:
            self._graph = self._capture(pool)
        self._graph.replay()
        return self._graph.pool()

    def _capture(self, pool: Any) -> torch.cuda.CUDAGraph:
        """Compile and warm up on a second stream, put the state back, and capture a step."""
        state = [self.flat, self.counter, self._losses, *self.inner.memory]
        copies = [tensor.clone() for tensor in state]
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self.compute_step()
                self.counter.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, copy in zip(state, copies, strict=True):
            tensor.copy_(copy)
        del copies
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.compute_step()
        return graph


class Stacked(Replicas):
    """Stacks of `size` replicas each, one stack after another."""

    def __init__(self, task: ReplicaTask, beginning: Beginning, size: int | None = None) -> None:
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
            state = [stack.flat, stack.counter, *stack.inner.memory]
            tensors |= {f"{number}/{index}": tensor for index, tensor in enumerate(state)}
        return tensors

    def load(self, saved: Mapping[str, Tensor], steps: int) -> None:
        """Load in place: parameters and inner states are views of this memory, and so is what a CUDA graph reads."""
        del steps  # each stack's counter has it
        for name, tensor in self.memory().items():
            tensor.copy_(saved[name])

    def as_beginning(self) -> Beginning:
        stack = self.stacks[0]
        parameters = {name: view.clone() for name, view in stack.layout.views(stack.flat[0]).items()}
        return Beginning(parameters, *stack.inner.first_state())


def _inner(model: nn.Module, task: ReplicaTask, state: Mapping[str, dict[str, Tensor]]) -> torch.optim.Optimizer:
    """Build the product's inner optimizer over the stack's memory. It is never stepped: DiLoCo reads its state."""
    inner = inner_optimizer(model, task.inner)
    for name, parameter in model.named_parameters():
        inner.state[parameter] = state[name]
    return inner


def _model(empty: NativeModel, parameters: dict[str, Tensor]) -> NativeModel:
    """Build a module whose parameters are these tensors."""
    model = deepcopy(empty)
    for name, tensor in parameters.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(tensor.detach()))
    model.model.reset_rotary(tensor.device)
    return model
