"""Cross entropy of k replicas with their output matrices, without keeping the logits (see models/native/head.py)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diloco.core.gpu import has_triton

ROWS_AT_ONCE = 16384


def stacked_losses(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """hidden [k, R, D], matrix [k, V, D], targets [k, R]: the mean cross entropy of each replica, [k] in fp32."""
    if hidden.is_cuda and has_triton() and hidden.dtype == torch.bfloat16:
        losses: Tensor = _FusedLosses.apply(hidden, matrix, targets)  # type: ignore[no-untyped-call]
        return losses
    logits = torch.bmm(hidden, matrix.transpose(1, 2)).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), reduction="none")
    return each.view(hidden.shape[:2]).mean(1)


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
        together = max(1, ROWS_AT_ONCE // R)
        rows = min(R, ROWS_AT_ONCE)
        for first_replica in range(0, k, together):
            replicas = slice(first_replica, first_replica + together)
            for first in range(0, R, rows):
                some = slice(first, first + rows)
                wanted = targets[replicas, some].reshape(-1)
                loss = losses[replicas, some]
                logits = torch.bmm(hidden[replicas, some], matrix[replicas].transpose(1, 2))  # (replicas, rows, V)
                flat_loss = torch.empty(wanted.numel(), device=hidden.device)
                softmax_gradient_(logits.flatten(0, 1), wanted, flat_loss, 1.0 / R)
                loss.copy_(flat_loss.view(loss.shape))
                hidden_gradient[replicas, some] = torch.bmm(logits, matrix[replicas])
                part = torch.bmm(logits.transpose(1, 2), hidden[replicas, some])
                matrix_gradient[replicas] = part if first == 0 else matrix_gradient[replicas] + part
        ctx.save_for_backward(hidden_gradient, matrix_gradient)
        return losses.mean(1)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_gradient, matrix_gradient = ctx.saved_tensors
        factor = scale[:, None, None]
        return hidden_gradient * factor.to(hidden_gradient.dtype), matrix_gradient * factor, None
