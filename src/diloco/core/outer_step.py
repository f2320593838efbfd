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

Both functions go through a fragment span by span, so neither needs a second copy of the model, and every operation
is elementwise, so the size of a span never changes a bit. Nothing here waits, travels or can fail.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diloco.core.digest import Digest
from diloco.core.fragments import Fragment, Span
from diloco.core.outer_optimizers import SGD, OuterOptimizer


@torch.no_grad()
def outer_gradient(fragment: Fragment, theta_i: Tensor | None = None) -> Iterator[tuple[Span, Tensor]]:
    """Line 12 inside the sum: Δ_i = θ^(t-1) − θ_i in fp32, as (span, [elements of the span]).

    The tensor is scratch memory: use it before asking for the next one. `theta_i`: a flat fp32 copy of the fragment's
    parameters, in place of the parameters themselves.
    """
    fragment.check_memory()
    kernels = fragment.kernels
    for span, theta, _ in fragment.visit():
        if kernels is not None:  # the same in one pass over a GPU's memory
            delta = fragment.scratch(span)
            kernels.outer_gradient(span.start, theta, out=delta)
        elif theta_i is not None:
            delta = torch.sub(theta, theta_i[span.slice], out=fragment.scratch(span))
        else:
            delta = fragment.read(span, theta)
        yield span, delta
        del delta  # before the next one is made


@torch.no_grad()
def outer_step(
    fragment: Fragment,
    mean_outer_gradient: Callable[[Span], Tensor] | None,
    mixing: float = 0.0,
    digest: Digest | None = None,
    turn: int = 0,
    in_one_pass: Callable[[OuterOptimizer], None] | None = None,
    *,
    plain: bool = False,
) -> None:
    """Lines 14 and 3: the anchor takes the outer step, and the worker's parameters follow it.

    `mean_outer_gradient(span)` gives Δ of that span in fp32, the same bits on every worker; None: this worker is alone
    (k = 1), Δ is its own outer gradient, and lines 12, 14 and 3 are one pass.
    `mixing` is α of Streaming DiLoCo: θ_i ← α θ_i + (1 − α) θ; 0 overwrites, as Algorithm 1 does, 1 leaves θ_i alone.
    `digest` is given the new anchor, span by span. `turn`: of the schedule, for an outer optimizer with a course.
    `plain`: θ ← θ − Δ, whatever the outer optimizer, whose state stays as it is: at the end of a run, where Δ is what
    some workers have left and others have nothing, momentum would add a whole step without work.
    `in_one_pass`: does all of it with an outer optimizer that the kernels know, if the fragment has any.
    """
    fragment.rounds += 1
    outer, kernels = fragment.outer_opt, fragment.kernels
    if outer.course is not None:
        outer = outer.at(turn)
    if plain:
        outer = SGD(lr=1.0)
    if in_one_pass is not None and kernels is not None and kernels.know(outer):
        in_one_pass(outer)
        return
    for span, theta, state in fragment.visit(write=True):
        delta = None if mean_outer_gradient is None else mean_outer_gradient(span)
        if kernels is not None and kernels.know(outer):  # the same in one pass over a GPU's memory
            kernels.outer_step(span.start, outer, theta, state, delta, mixing)
        else:
            if delta is None:
                delta = fragment.read(span, theta)
            outer.update(theta, delta, state, fragment.rounds)  # line 14
            if mixing < 1.0:
                fragment.follow(span, theta, mixing)  # line 3
        del delta  # before the next one is made
        if digest is not None:
            digest.add(theta)


@torch.no_grad()
def next_anchor(
    fragment: Fragment, mean_outer_gradient: Callable[[Span], Tensor], out: Tensor, digest: Digest, turn: int = 0
) -> None:
    """Line 14 into `out` (flat, fp32), bit for bit what `outer_step` will make of the anchor. Changes nothing else."""
    outer = fragment.outer_opt if fragment.outer_opt.course is None else fragment.outer_opt.at(turn)
    copies = {name: torch.empty_like(fragment.scratch(next(fragment.spans()))) for name in fragment.state}
    for span, theta, state in fragment.visit():
        new = out[span.slice].copy_(theta)
        state_copy = {name: copies[name][: len(buffer)].copy_(buffer) for name, buffer in state.items()}
        outer.update(new, mean_outer_gradient(span), state_copy, fragment.rounds + 1)
        digest.add(new)
