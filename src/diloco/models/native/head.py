"""The output matrix and the loss together: mean cross entropy of next tokens, without keeping the logits.

The logits are a language model's largest tensor (B · T · V). As separate operations, matrix, softmax and loss read and
write them five times and hold them twice. Here, for bf16 on a GPU, they are computed a few thousand rows at a time; a
kernel turns each row into its loss and, in place, its gradient; the gradients of hidden states and matrix follow while
the chunk is in memory. The result is that of F.cross_entropy in fp32 on bf16 logits. In all other cases (CPU, fp32,
evaluation, and fp16, whose range is too small for gradients before the loss scale) it is F.cross_entropy itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diloco.core.gpu import has_triton

ROWS_AT_ONCE = 16384


def next_token_loss(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross entropy in nats, fp32, of hidden (N, D), matrix (V, D), targets (N)."""
    if hidden.is_cuda and has_triton() and hidden.dtype == torch.bfloat16 and torch.is_grad_enabled():
        loss: Tensor = _FusedLoss.apply(hidden, matrix.bfloat16(), targets)  # type: ignore[no-untyped-call]
        return loss
    return F.cross_entropy(F.linear(hidden, matrix).float(), targets)


class _FusedLoss(torch.autograd.Function):
    """The gradient is computed in the forward pass, while the logits are there; backward only scales it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        from diloco.models.native.head_kernel import softmax_gradient_

        rows = hidden.shape[0]
        losses = torch.empty(rows, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        matrix_gradient = torch.zeros(matrix.shape, device=matrix.device)
        for first in range(0, rows, ROWS_AT_ONCE):
            chunk = slice(first, first + ROWS_AT_ONCE)
            logits = hidden[chunk] @ matrix.T  # (rows, V)
            softmax_gradient_(logits, targets[chunk], losses[chunk], 1.0 / rows)
            torch.mm(logits, matrix, out=hidden_gradient[chunk])
            matrix_gradient += logits.T @ hidden[chunk]
        ctx.save_for_backward(hidden_gradient, matrix_gradient)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_gradient, matrix_gradient = ctx.saved_tensors
        return hidden_gradient * scale, matrix_gradient * scale, None
