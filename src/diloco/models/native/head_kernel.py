"""Turns a row of logits into its cross entropy and, in place, its gradient, in one pass over memory (Triton).

Imported only where there is a GPU, since Triton may be absent elsewhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _kernel(logits, targets, losses, scale, columns, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    target = tl.load(targets + row)
    at = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):  # maximum and sum of the softmax in one pass
        x = tl.load(base + start + at, start + at < columns, float("-inf")).to(tl.float32)
        larger = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - larger) + tl.sum(tl.exp(x - larger))
        top = larger
    log_sum = top + tl.log(total)
    tl.store(losses + row, log_sum - tl.load(base + target).to(tl.float32))
    tl.debug_barrier()  # the target's logit must be read before its place is overwritten below
    for start in range(0, columns, BLOCK):
        x = tl.load(base + start + at, start + at < columns, float("-inf")).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + at == target, 1.0, 0.0)
        tl.store(base + start + at, (gradient * scale).to(tl.bfloat16), start + at < columns)


def softmax_gradient_(logits: Tensor, targets: Tensor, losses: Tensor, scale: float) -> None:
    """losses ← cross entropy of each row; logits ← its gradient times `scale`. logits (N, V) bf16, targets (N)."""
    assert logits.dtype == torch.bfloat16 and logits.stride(1) == 1
    _kernel[(logits.shape[0],)](
        logits, targets, losses, scale, logits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=8
    )
