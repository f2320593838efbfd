"""AdamW and Muon for k replicas at once, on tensors [k, N], with a step count for each replica.

The results are those of torch.optim.AdamW and torch.optim.Muon as training/inner.py sets them up, up to rounding:
weight decay for matrices and embeddings, none for norms; with Muon, the matrices of the blocks are Muon's. A replica
that is not active keeps its parameters and its state. Nothing here asks the device for a number, so a step can be
captured in a CUDA graph.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from diloco.lab.layout import Layout
from diloco.lab.simulation.replicas import Beginning
from diloco.training.config.run import InnerConfig
from diloco.training.inner import MUON_MOMENTUM

_EPSILON = 1e-8  # AdamW's
_MUON = (3.4445, -4.7750, 2.0315)  # the coefficients and the number of torch.optim.Muon's iterations
_MUON_STEPS = 5
_MUON_EPSILON = 1e-7
_CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class StackedInner:
    """The inner optimizers of k replicas."""

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
        """The tensors that a step changes."""
        return [*self._state.values(), self._steps]

    def set_active(self, active: Sequence[bool] | None) -> None:
        assert self._masked or active is None
        values = [True] * len(self._active) if active is None else list(active)
        self._active.copy_(torch.tensor(values)[:, None])

    def update(self, flat: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """flat ← one step along the gradient [k, N], clipped for each replica, with the learning rate [1]."""
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
        """The matrices of one shape, of all layers and replicas, in one batch."""
        config = self.config
        k = len(flat)
        momentum = MUON_MOMENTUM if config.momentum is None else config.momentum
        theta, g, buffer = (
            self._matrices(names, stacked) for stacked in (flat, gradient, self._state["momentum_buffer"])
        )
        ready = []
        for own_gradient, memory in zip(g, buffer, strict=True):
            clipped = own_gradient if factor is None else own_gradient * factor[:, :, None]
            new = memory.lerp(clipped, 1 - momentum)
            memory.copy_(self._kept(new, memory))
            ready.append(clipped.lerp(new, momentum))
        turned = torch.split(orthogonalise(torch.cat(ready)), k)
        rows, columns = theta[0].shape[1:]
        scaled = rate * (0.2 * math.sqrt(max(rows, columns)))
        for parameter, direction in zip(theta, turned, strict=True):
            new = parameter * (1 - rate * config.weight_decay) - scaled * direction
            parameter.copy_(self._kept(new, parameter))

    def _kept(self, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(self._active[:, :, None], new, old) if self._masked else new

    def _matrices(self, names: list[str], flat: Tensor) -> list[Tensor]:
        """Views [k, rows, columns]."""
        matrices = []
        for name in names:
            at, shape = self._layout.places[name]
            matrices.append(torch.unflatten(flat[:, at : at + shape.numel()], 1, tuple(shape)))
        return matrices

    def views(self) -> list[dict[str, dict[str, Tensor]]]:
        """The state of each replica by parameter, as torch's optimizers have it, in this memory."""
        states = []
        hidden = set(self._layout.hidden_matrices) if self.config.optimizer == "muon" else set()
        for row, steps in enumerate(self._steps):
            by_kind = {kind: self._layout.views(values[row]) for kind, values in self._state.items()}
            adamw = {"exp_avg", "exp_avg_sq"}
            mine: dict[str, dict[str, Tensor]] = {}
            for name in self._layout.places:
                kinds = {"momentum_buffer"} if name in hidden else adamw
                mine[name] = {kind: by_kind[kind][name] for kind in kinds}
                if name not in hidden:
                    mine[name]["step"] = steps[0]
            states.append(mine)
        return states

    def saved(self) -> tuple[Mapping[str, Mapping[str, Tensor]], int]:
        """State and steps of replica 0, as `Beginning` has them."""
        mine: dict[str, dict[str, Tensor]] = {}
        for name, state in self.views()[0].items():
            for kind, view in state.items():
                if kind != "step":
                    mine.setdefault(kind, {})[name] = view.clone()
        return mine, int(self._steps[0])


def clip_factors(gradient: Tensor, largest: float) -> Tensor:
    """Factors [k, 1] that bring the norm of each replica's gradient [k, N] to at most `largest`."""
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
    """Newton–Schulz in bf16, as torch.optim.Muon does it for one matrix: [n, rows, columns]."""
    a, b, c = _MUON
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.transpose(1, 2) if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_MUON_EPSILON)
    for _ in range(_MUON_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).float()
