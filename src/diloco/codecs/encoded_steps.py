"""An outer gradient into bytes, and the outer step with a mean that came back as bytes.

Both go through a fragment span by span: one span is subtracted, encoded and forgotten before the next, and a mean is
decoded where it is used. On a GPU either is one launch for the whole fragment, if the codec has kernels for it
(gradient_kernels.py). The bits are the same.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.error_feedback import ErrorFeedback
from diloco.core.digest import Digest
from diloco.core.fragments import Fragment, Span
from diloco.core.one_pass import outer_gradient, outer_step
from diloco.core.outer_optimizers import OuterOptimizer

if TYPE_CHECKING:
    from diloco.core.kernels import Kernels

_ERROR_EVERY = 16  # what a codec loses is measured on every so many-th span
_ERROR_ELEMENTS = 1 << 22  # and on at most so many elements of it


def encode_outer_gradient(
    fragment: Fragment,
    vector: EncodedVector,
    *,
    gradient: Iterator[tuple[Span, Tensor]] | None = None,
    feedback: ErrorFeedback | None = None,
    theta_i: Tensor | None = None,
) -> tuple[float, float | None]:
    """Put an outer gradient into `vector`: its norm, and the codec's relative error ‖sent − Δ‖ / ‖Δ‖.

    The norm is that of what is sent, with error feedback. The error is measured on some spans; None: the codec is
    lossless. `gradient`: another one than the fragment's own. `theta_i`: a flat copy of the parameters, in their place.
    """
    kernels = None if gradient is not None or feedback is not None else kernels_in_one_pass(fragment, vector)
    if kernels is not None:
        from diloco.codecs.gradient_kernels import encode_gradient

        squares = encode_gradient(kernels, fragment, vector)
        return _total([squares[1].sqrt()]), _relative([squares])
    norms = []
    squared_errors = []
    for number, (span, delta) in enumerate(gradient or outer_gradient(fragment, theta_i)):
        if feedback is not None:
            norms.append(feedback.encode(vector, span, delta))
        else:
            norms.append(torch.linalg.vector_norm(delta))
            if vector.num_bytes:
                vector.encode(span.first_part, delta)
        if number % _ERROR_EVERY == 0 and vector.num_bytes and not vector.codec.lossless:
            part = fragment.layout.part_elements
            parts = min(span.num_parts, max(1, _ERROR_ELEMENTS // part))
            squared_errors.append(vector.squared_error(span.first_part, parts, delta[: parts * part]))
        del delta  # before the next one is made
    return _total(norms), _relative(squared_errors)


@torch.no_grad()
def step_with_encoded_mean(
    fragment: Fragment, outer_opt: OuterOptimizer, mean: EncodedVector, mixing: float
) -> tuple[str, float | None]:
    """The outer step of a fragment with a round's mean: the digest of its new anchor, and the norm of the mean.

    A mean without bytes is that of a worker alone, whose outer gradient is its own: its norm is None.
    """
    taken = Digest(fragment.device)
    if not mean.num_bytes:
        outer_step(fragment, outer_opt, None, mixing, taken)
        return taken.hexdigest(), None
    kernels = kernels_in_one_pass(fragment, mean)
    if kernels is not None and kernels.know(outer_opt):
        from diloco.codecs.gradient_kernels import step_with_mean

        fragment.rounds += 1
        norm = step_with_mean(kernels, fragment, mean, outer_opt, mixing, taken).sqrt()
        return taken.hexdigest(), _total([norm])
    decoded = _DecodedMean(mean, fragment.device)
    outer_step(fragment, outer_opt, decoded, mixing, taken)
    return taken.hexdigest(), decoded.norm()


def next_anchor_with_encoded_mean(
    fragment: Fragment, outer_opt: OuterOptimizer, mean: EncodedVector, out: Tensor
) -> tuple[str, float]:
    """What `step_with_encoded_mean` will make of the anchor, into `out`: its digest, and the norm of the mean."""
    taken = Digest(fragment.device)
    decoded = _DecodedMean(mean, fragment.device)
    fragment.next_anchor(outer_opt, decoded, out, taken)
    return taken.hexdigest(), decoded.norm()


class _DecodedMean:
    """An encoded mean as a function of the span, which also gathers its norm."""

    def __init__(self, encoded: EncodedVector, device: torch.device) -> None:
        self._encoded = encoded
        self._device = device
        self._norms: list[Tensor] = []

    def __call__(self, span: Span) -> Tensor:
        delta = self._encoded.decode(span.first_part, span.num_parts, self._device)
        self._norms.append(torch.linalg.vector_norm(delta))
        return delta

    def norm(self) -> float:
        return _total(self._norms)


def kernels_in_one_pass(fragment: Fragment, vector: EncodedVector) -> "Kernels | None":
    """The kernels that take a round of this fragment and vector in one pass; None on a CPU (gradient_kernels.py)."""
    if fragment.device.type != "cuda" or fragment.kernels is None or not vector.num_bytes:
        return None
    from diloco.codecs.gradient_kernels import kernels_for

    return kernels_for(fragment, vector)


def _relative(squares: Sequence[Tensor]) -> float | None:
    """The error of some values, from (squared error, squared norm) of each."""
    error, whole = torch.stack(list(squares)).double().sum(0).tolist() if squares else (0.0, 0.0)
    return math.sqrt(error / whole) if whole > 0 and math.isfinite(error / whole) else None


def _total(norms: Sequence[Tensor]) -> float:
    """Asked for once: on a GPU every question waits for all that was begun before it."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)).double())) if norms else 0.0
