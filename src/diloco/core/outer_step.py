"""One outer step: Algorithm 1 of DiLoCo (arXiv 2311.08105), on one screen.

     1: for outer step t = 1…T                              core/schedule.py says when
     2:   for worker i = 1…k                                every worker runs this same code
     3:     θ_i ← θ^(t-1)                                   outer_step, last line
     4:     for inner step h = 1…H
     5-8:     θ_i ← InnerOpt(θ_i, ∇L)                       optimizer.py, DiLoCo.inner_step
    12:   Δ ← Σ w_i (θ^(t-1) − θ_i) / Σ w_i                 outer_gradient here; the mean is an engine's work
    14:   θ^(t) ← OuterOpt(θ^(t-1), Δ)                      outer_step here

With one fragment and no overlap this is DiLoCo. With several fragments, each with its own anchor, momentum and
offset, and a merge that comes later than the post, it is Streaming DiLoCo (arXiv 2501.18512); `mixing` is its α.

A fragment (core/fragments.py) is some of the model's tensors with their anchor θ. Both functions go through it span by
span, so neither needs a second copy of the model, and every operation is elementwise, so the size of a span never
changes a bit. Nothing here waits, travels or can fail. On a GPU outer/sending.py may take the same steps in kernels.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diloco.core.digest import Digest
from diloco.core.fragments import Fragment, Span
from diloco.core.outer_optimizers import OuterOptimizer


@torch.no_grad()
def outer_gradient(fragment: Fragment, theta_i: Tensor | None = None) -> Iterator[tuple[Span, Tensor]]:
    """Compute line 12 inside the sum: Δ_i = θ^(t-1) − θ_i in fp32, as (span, [elements of the span]).

    The tensor is scratch memory: use it before asking for the next one. `theta_i`: a flat fp32 copy of the fragment's
    parameters, in place of the parameters themselves.
    """
    for span, theta, _ in fragment.visit():
        yield span, fragment.minus_parameters(span, theta, theta_i)


@torch.no_grad()
def outer_step(
    fragment: Fragment,
    outer_opt: OuterOptimizer,
    mean_outer_gradient: Callable[[Span], Tensor] | None,
    mixing: float = 0.0,
    digest: Digest | None = None,
) -> None:
    """Take lines 14 and 3: the outer step of the anchor, which the worker's parameters then follow.

    `mean_outer_gradient(span)` gives Δ of that span in fp32, the same bits on every worker; None: this worker is alone
    (k = 1), and Δ is its own outer gradient.
    `mixing` is α of Streaming DiLoCo: θ_i ← α θ_i + (1 − α) θ; 0 overwrites, as Algorithm 1 does, 1 leaves θ_i alone.
    `digest` is given the new anchor.
    """
    fragment.rounds += 1
    for span, theta, state in fragment.visit(write=True, digest=digest):
        delta = fragment.minus_parameters(span, theta) if mean_outer_gradient is None else mean_outer_gradient(span)
        outer_opt.update(theta, delta, state, fragment.rounds)  # line 14
        fragment.follow(span, theta, mixing)  # line 3
        del delta  # before the next one is made
