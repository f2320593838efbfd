"""The two functions of outer_step.py as callers use them: on a GPU each is one pass over its memory, with kernels.

Where a fragment has no kernels (a CPU, parameters that are not fp32) or they do not know the outer optimizer, these are
the functions of outer_step.py themselves. The bits are the same.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diloco.core import outer_step as algorithm
from diloco.core.digest import Digest
from diloco.core.fragments import Fragment, Span
from diloco.core.outer_optimizers import OuterOptimizer


@torch.no_grad()
def outer_gradient(fragment: Fragment, theta_i: Tensor | None = None) -> Iterator[tuple[Span, Tensor]]:
    """Line 12 as in outer_step.py, after a check of the parameters' memory."""
    fragment.check_memory()
    kernels = fragment.kernels
    if kernels is None:
        yield from algorithm.outer_gradient(fragment, theta_i)
        return
    for span, anchor, _ in fragment.visit():
        delta = fragment.scratch(span)
        kernels.outer_gradient(span.start, anchor, out=delta)
        yield span, delta
        del delta  # before the next one is made


@torch.no_grad()
def outer_step(
    fragment: Fragment,
    outer_opt: OuterOptimizer,
    mean_outer_gradient: Callable[[Span], Tensor] | None,
    mixing: float = 0.0,
    digest: Digest | None = None,
) -> None:
    """Lines 14 and 3 as in outer_step.py, with line 12 too, in one kernel for each span."""
    kernels = fragment.kernels
    if kernels is None or not kernels.know(outer_opt):
        algorithm.outer_step(fragment, outer_opt, mean_outer_gradient, mixing, digest)
        return
    fragment.rounds += 1
    for span, anchor, state in fragment.visit(write=True, digest=digest):
        delta = None if mean_outer_gradient is None else mean_outer_gradient(span)
        kernels.outer_step(span.start, outer_opt, anchor, state, delta, mixing)
        del delta  # before the next one is made
