"""Error feedback: what a codec leaves out of a round is sent in later ones (arXiv 2508.15706; method of EF-SGD).

    a = β e + Δ         the outer gradient with what earlier rounds have left out
    Q(a) is sent        Q is any codec
    e ← a − Q(a)        once a round has this contribution in its mean

If the round fails, or the contribution is refused, e stays as it was: the worker's next outer gradient carries the same
work again. The error is a worker's own. It is saved with the worker and goes where its parameters go: a joiner begins
without one, and so does a worker that drops its own work for the others' parameters.
"""

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector, scratch
from diloco.core.fragments import Span


class ErrorFeedback:
    """The error of one fragment; `device` is where it is kept."""

    def __init__(self, numel: int, decay: float, device: torch.device | str) -> None:
        """`decay` is β."""
        self._decay = decay
        self.error = torch.zeros(numel, device=device)
        self.next_error: Tensor | None = None
        """The error after the round in flight, if its mean takes this worker's contribution in."""

    @torch.no_grad()
    def encode(self, vector: EncodedVector, span: Span, delta: Tensor) -> Tensor:
        """Encode a span of the outer gradient with its error; the norm of what is sent, not finite if a is not."""
        if self.next_error is None:
            self.next_error = torch.empty_like(self.error)
        a = scratch("feedback", delta.shape, delta.device)
        a.copy_(self.error[span.slice]).mul_(self._decay).add_(delta)
        vector.encode(span.first_part, a)
        sent = vector.decode(span.first_part, span.num_parts, delta.device)
        whole, norm = torch.linalg.vector_norm(a), torch.linalg.vector_norm(sent)
        self.next_error[span.slice].copy_(a.sub_(sent))
        return torch.where(torch.isfinite(whole), norm, whole)

    def end_round(self, taken: bool) -> None:
        """The round in flight is over; `taken`: this worker's contribution is in its mean."""
        self.error, self.next_error = self.error_after(taken), None

    def error_after(self, taken: bool) -> Tensor:
        """What `end_round(taken)` will leave, without ending the round."""
        return self.next_error if taken and self.next_error is not None else self.error

    def clear(self) -> None:
        self.error.zero_()
        self.next_error = None
